"""``h2d explain``: what the policy would choose, why, and what would change it."""
