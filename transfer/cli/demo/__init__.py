"""``h2d demo``: a small language model trained under ZeRO-3, with this package and under DeepSpeed alone."""
