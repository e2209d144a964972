"""``h2d trace``: what a torch profiler trace says about copies from the host to the device. Nothing here imports torch.

``reading`` reads the events of a file one by one, ``gathering`` keeps what is needed of them, ``figures`` makes numbers
of it.
"""
