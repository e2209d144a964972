"""What strategies hold and cut: staging and scratch rings, page-locks, chunks, and how much the host has."""
