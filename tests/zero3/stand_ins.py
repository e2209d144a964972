"""A stand-in for ZeRO-3: the attributes and methods that the copy-back uses, without DeepSpeed.

The real one is in ``test_training.py``.
"""

import types

import torch

from transfer import HostToDeviceTransfer, PageableTransfer

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


class SteppingStage3(Stage3):
    """With DeepSpeed's order of a step: update, copy-back and release of each sub-group, then the end.

    An update adds one to the master. ``seen_at_update`` and ``seen_at_gather`` are what the partitions
    held when an update began, and when parameters would have been gathered.
    """

    def __init__(self, simulated, sub_groups=2):
        super().__init__(simulated, sub_groups)
        for partition in self.fp16_partitioned_groups_flat:
            partition.fill_(-1)
        self.optimizer = None
        self.overflow = False
        self.raise_at = self.call_at = None
        self.seen_at_update, self.seen_at_gather = [], None
        self.swap_buffer = None

    def values(self):
        return [partition.tolist() for partition in self.fp16_partitioned_groups_flat]

    def use_swap_buffers(self, accelerator):
        """Keeps the masters elsewhere, and brings each into one pinned buffer for its update."""
        self.swap_optimizer = True
        self.on_disk = [master.clone() for master in self.fp32_partitioned_groups_flat]
        self.swap_buffer = accelerator.pin_empty(8, dtype=torch.float32)
        self.fp32_partitioned_groups_flat = [torch.nn.Parameter(torch.empty(0)) for _ in self.on_disk]

    def _swappable_optimizer_subgroup(self, sub_group_id):
        return self.swap_buffer is not None

    def step(self, closure=None):
        if self.overflow:
            return
        for sub_group_id in range(len(self.fp32_partitioned_groups_flat)):
            self._prepare_sub_group(sub_group_id, set())
            self.unscale_and_clip_grads(sub_group_id, 1.0)
            self._optimizer_step(sub_group_id)
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
            self._release_sub_group(sub_group_id, set())
        self._post_step(set())

    def _prepare_sub_group(self, sub_group_id, timer_names):
        if self.swap_buffer is not None:
            self.swap_buffer.copy_(self.on_disk[sub_group_id])
            self.fp32_partitioned_groups_flat[sub_group_id].data = self.swap_buffer

    def unscale_and_clip_grads(self, sub_group_id, total_norm):
        self.clipped = sub_group_id

    def _optimizer_step(self, sub_group_id):
        self.seen_at_update.append(self.values())
        self.fp32_partitioned_groups_flat[sub_group_id].data.add_(1)
        for action, found in (("raise", self.raise_at), ("call", self.call_at)):
            if found is not None and found[0] == sub_group_id:
                if action == "raise":
                    raise found[1]
                found[1]()

    def _release_sub_group(self, sub_group_id, timer_names):
        if self.swap_buffer is not None:
            self.on_disk[sub_group_id].copy_(self.swap_buffer)
            self.fp32_partitioned_groups_flat[sub_group_id].data = torch.empty(0)
            self.swap_buffer.fill_(-99)

    def _post_step(self, timer_names):
        self.calls.append("post")
        self.seen_at_gather = self.values()


class UpdatesTwice(SteppingStage3):
    """Updates its first sub-group once more, before that sub-group's copy is waited for; that update raises."""

    def step(self, closure=None):
        self._optimizer_step(0)
        self._reassign_or_swap_out_partitioned_parameters(0)
        self.raise_at = (0, RuntimeError("diverged"))
        self._optimizer_step(0)


class Op:
    """CPU Adam's op, whose update adds one; ``at`` is called after so many updates."""

    def __init__(self):
        self.updated, self.at = [], {}

    def adam_update(self, parameters, *_):
        parameters.add_(1)
        self.updated.append(parameters.numel())
        self.at.pop(len(self.updated), lambda: None)()


class TiledStage3(SteppingStage3):
    """Updates by way of an op, as CPU Adam does."""

    def __init__(self, simulated, sub_groups=3):
        super().__init__(simulated, sub_groups)
        self.optimizer = types.SimpleNamespace(ds_opt_adam=Op(), step=lambda: None)

    def _optimizer_step(self, sub_group_id):
        self.seen_at_update.append(self.values())
        master = self.fp32_partitioned_groups_flat[sub_group_id].data
        self.optimizer.ds_opt_adam.adam_update(master, *(torch.zeros(8) for _ in range(3)))


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
