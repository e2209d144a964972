"""What strategies hold: staging and scratch rings, page-locks. Also chunks, and how much memory the host has."""
