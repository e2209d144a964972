"""ZeRO-3's gradients on the host, in 16 bits once, and in fp32 when somebody asks.

DeepSpeed keeps two buffers of them: what reductions accumulate, in the dtype of the gradients, and its cast to fp32,
which the step scales and reads. The second holds nothing that the first does not, but for the factors. So
``HostGradients`` gives it back: each master's ``grad`` becomes a ``LazyGradient``, which has the values of that buffer,
and no memory.
"""

from .host_gradients import HostGradients
from .lazy_gradient import LazyGradient

__all__ = ["HostGradients", "LazyGradient"]
