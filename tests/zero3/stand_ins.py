"""A stand-in for ZeRO-3: the attributes and methods that the copy-back uses, without DeepSpeed.

The real one is in ``test_training.py``.
"""

import types

import torch

from transfer import (
    HostToDeviceTransfer,
    PageableTransfer,
)

COPY_BACK = "_reassign_or_swap_out_partitioned_parameters"


class Stage3:
    offload_param = False
    offload_optimizer = True
    swap_optimizer = False

    def __init__(self, simulated, sub_groups=2):
        self.fp16_partitioned_groups_flat = [simulated.device_empty(8, dtype=torch.bfloat16) for _ in range(sub_groups)]
        self.fp32_partitioned_groups_flat = [torch.arange(8.0) + index for index in range(sub_groups)]
        self.calls = []

    def _unflatten_partitioned_parameters(self, sub_group_id):
        self.calls.append(("unflatten", sub_group_id))

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        self.calls.append(("deepspeed", sub_group_id))

    def destroy(self):
        self.calls.append("destroy")


class SuperOffload(Stage3):
    """Overrides the copy-back without calling the class above, as SuperOffload does."""

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        self.calls.append(("superoffload", sub_group_id))


class Spy(HostToDeviceTransfer):
    def __init__(self, simulated):
        super().__init__(accelerator=simulated)
        self.log = []

    def prepare(self, source):
        self.log.append(("prepare", source.tolist()[0]))

    def copy(self, destination, source):
        self.log.append(("copy", source.tolist()[0]))
        super().copy(destination, source)

    def close(self):
        self.log.append("close")

    def _submit(self, destination, source):
        return PageableTransfer(accelerator=self.accelerator)._submit(destination, source)


def engine_of(optimizer, **deepspeed_config):
    return types.SimpleNamespace(optimizer=optimizer, _config=types.SimpleNamespace(_param_dict=deepspeed_config))


def copy_backs(spy):
    return [entry[1] for entry in spy.log if entry[0] == "copy"]


SECTION = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}


def chunk(transfer):
    return transfer.policy.config.section("pinned_staged").chunk_elements


class Engine:
    """What ``install`` hooks of DeepSpeedEngine."""

    def __init__(self, simulated, **deepspeed_config):
        self._config = types.SimpleNamespace(_param_dict=deepspeed_config)
        self.built = 0
        self.simulated = simulated
        self.optimizer = self._configure_zero_optimizer(None)

    def _configure_zero_optimizer(self, optimizer):
        self.built += 1
        return Stage3(self.simulated)
