"""``h2d plan``: what a job would gain, computed before anything is installed or run.

``machine`` has the rates, each with its source, ``model`` makes seconds and bytes of them, ``checks`` compares the
model with runs that it was not made from. Nothing here imports torch, but for a machine profile that is there.
"""
