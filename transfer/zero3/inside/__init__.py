"""Copies in the middle of DeepSpeed's functions: restores, reloads of states, Muon's momentum, ZenFlow's copy-back.

There is no method to replace that makes nothing else. So the function runs as it is, and a mode of torch hands those of
its copies to the transfer that were read in its source.
"""

from .patches import PATCHES, patch_modules

__all__ = ["PATCHES", "patch_modules"]
