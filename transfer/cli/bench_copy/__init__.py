"""bench_copy."""
