"""What the tests of ``pinned_direct`` share."""

import pytest
import torch

from transfer import PinnedDirectTransfer, build_transfer

BF16 = torch.bfloat16
PAGE = 4096
MODES = pytest.mark.parametrize("mapped", [False, True], ids=["chunks", "mapped"])


class Recorder:
    """Notes each copy that is queued on an accelerator and each registration; refuses large ones if told to."""

    def __init__(self, accelerator, most_bytes=None, answer=None):
        self.copies, self.registered, self.unregistered, self.refused = [], [], [], 0
        enqueue, register, unregister = (
            accelerator.enqueue_copy,
            accelerator.register_host_memory,
            accelerator.unregister_host_memory,
        )

        def recording_copy(destination, source):
            from_host = accelerator.on_host(source)
            self.copies.append((from_host, source.numel(), destination.dtype, source.dtype, source.data_ptr()))
            enqueue(destination, source)

        def recording_register(address, num_bytes):
            if most_bytes is not None and num_bytes > most_bytes:
                self.refused += 1
                if answer is None:
                    raise RuntimeError("out of locked memory")
                return answer
            self.registered.append((address, num_bytes))
            return register(address, num_bytes)

        def recording_unregister(address):
            unregister(address)
            self.unregistered.append(address)

        accelerator.enqueue_copy = recording_copy
        accelerator.register_host_memory = recording_register
        accelerator.unregister_host_memory = recording_unregister

    @property
    def from_host(self):
        return [copy[1:4] for copy in self.copies if copy[0]]


def direct(accelerator, **options):
    """The strategy alone, in chunks unless it is told otherwise."""
    return PinnedDirectTransfer(accelerator=accelerator, **{"mapped": False, **options})


def routed(accelerator, strategy="pinned_direct", *, fallback=True, **options):
    """The strategy as users have it: others are taken where it cannot."""
    config = {"strategy": strategy, "fallback": fallback, strategy: options, "pinned_staged": {"chunk_elements": 4096}}
    return build_transfer({**config, strategy: options}, accelerator)


def empty(accelerator, *size, dtype=BF16):
    return accelerator.device_empty(*size, dtype=dtype).fill_(-1)
