"""bench_zero3."""
