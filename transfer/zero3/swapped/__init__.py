"""Optimizer state that lives in files between steps.

``file_stream`` lets it pass through a step tile by tile: ``slots`` are the memory of tiles, ``state_file`` reads and
writes DeepSpeed's files. ``swap_buffers`` page-locks what DeepSpeed reads whole sub-groups into, where it does.
"""
