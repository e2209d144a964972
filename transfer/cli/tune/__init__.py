"""``h2d tune``: measures this machine and writes its profile."""
