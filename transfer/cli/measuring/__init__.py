"""measuring."""
