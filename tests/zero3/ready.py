"""What every process that trains needs, and takes seconds: DeepSpeed's engine, CPU Adam, and what it asks the machine.

Imported by the process that others are forked from (see ``launching.py``), and by each that is not.
"""

import functools
import importlib

import cpuinfo  # type: ignore[import-untyped]
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.utils import numa, nvtx

from tests.zero3 import cpu_adam_build

#: torch imports its compiler with the first optimizer.
MODULES = ("torch._dynamo", "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3", "deepspeed.ops.adam", "pytest")
for module in MODULES:
    importlib.import_module(module)
cpu_adam_build.ask_the_cpu_once()
cpuinfo.get_cpu_info()
numa.get_numa_cores = functools.cache(numa.get_numa_cores)  # a program is run for it in each micro-step
nvtx.enable_nvtx = False  # marks for a profiler, around whatever DeepSpeed calls
# Where there is a GPU, loading asks CUDA for it, which does not survive a fork: each process loads it then.
if cpu_adam_build.is_compiled() and not torch.cuda.is_available():
    CPUAdamBuilder().load(verbose=False)
