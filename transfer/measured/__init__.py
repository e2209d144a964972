"""``strategy: measured``: a profile of this machine, and what it says of a copy."""
