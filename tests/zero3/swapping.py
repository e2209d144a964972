"""A stand-in for ZeRO-3 with optimizer state on NVMe: files, swap buffers that their manager frees, the real order."""

import types

import torch

from tests.zero3.stand_ins import SteppingStage3

NUMEL = 8
#: What lies in a buffer that is free: a read that is too late, or a copy from it, shows it.
FREE = -99.0


class SwapBufferManager:
    """Owns the buffers. Dying, it tells ``freed`` which of them were still page-locked when their memory went."""

    def __init__(self, accelerator, freed, count=4):
        # Larger than a sub-group, as DeepSpeed's are.
        self.all_buffers = [torch.full((NUMEL + 4,), FREE) for _ in range(count)]
        self.used_buffer_index = {}
        self._accelerator, self._freed = accelerator, freed

    def allocate(self):
        index = next(i for i in range(len(self.all_buffers)) if i not in self.used_buffer_index.values())
        buffer = self.all_buffers[index].narrow(0, 0, NUMEL)
        self.used_buffer_index[id(buffer)] = index
        return buffer

    def free(self, buffer):
        del self.used_buffer_index[id(buffer)]
        buffer.fill_(FREE)

    def __del__(self):
        self._freed.append([self._accelerator.is_pinned(buffer) for buffer in self.all_buffers])


class SwapInfo:
    """A swapped sub-group: its file, and gradients that were too small to be swapped."""

    def __init__(self, path, old_layout=False):
        if old_layout:  # DeepSpeed 0.16
            self.swap_paths = [str(path)]
        else:
            self.tensors = [types.SimpleNamespace(swap_path=str(path))]
        self.path = path
        self.unswapped_gradients = {0: torch.ones(2)}

    def numel(self):
        return NUMEL

    def dtype(self):
        return torch.float32

    def release_unswapped_gradients(self):
        self.unswapped_gradients = {}

    def read(self):
        return torch.frombuffer(bytearray(self.path.read_bytes()), dtype=torch.float32)[:NUMEL].clone()

    def write(self, values):
        # Files are padded to whole disk blocks.
        self.path.write_bytes(torch.cat([values, torch.full((NUMEL,), FREE)]).numpy().tobytes())


class SwappingStage3(SteppingStage3):
    """Sub-groups live in files, but for those in ``in_memory``. ``swapped_in`` counts what is read for updates.

    With ``pipelined``, a sub-group is written while the next one is updated, its buffer is free only after
    that, and its master goes on pointing into it, as in DeepSpeed's pipelined swapper.
    """

    swap_optimizer = True

    def __init__(self, simulated, folder, sub_groups=3, in_memory=(), pipelined=False, old_layout=False):
        super().__init__(simulated, sub_groups)
        self.in_memory, self.pipelined, self.writing = in_memory, pipelined, None
        self.fp16_groups = [[f"parameter {each}"] for each in range(sub_groups)]
        self.freed, self.swapped_in, self.accelerator = [], [], simulated
        infos = {}
        for each, master in enumerate(self.fp32_partitioned_groups_flat):
            if each in in_memory:
                continue
            infos[str(each)] = SwapInfo(folder / f"{each}.tensor.swp", old_layout)
            infos[str(each)].write(master)
            self.fp32_partitioned_groups_flat[each] = torch.nn.Parameter(torch.empty(0))
            self.fp32_partitioned_groups_flat[each].ds_id = str(each)
        self.optimizer_swapper = types.SimpleNamespace(swap_params_info=infos)
        self.replace_manager()

    def replace_manager(self):
        self.optimizer_swapper.swap_buffer_manager = SwapBufferManager(self.accelerator, self.freed)

    def info(self, sub_group_id):
        return self.optimizer_swapper.swap_params_info[str(sub_group_id)]

    def buffers(self):
        return self.optimizer_swapper.swap_buffer_manager.all_buffers

    def _swappable_optimizer_subgroup(self, sub_group_id):
        return sub_group_id not in self.in_memory

    def step(self, closure=None):
        for sub_group_id in range(len(self.fp16_groups)):
            self._prepare_sub_group(sub_group_id, set())
            self._optimizer_step(sub_group_id)
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
            self._release_sub_group(sub_group_id, set())
        self._finish_write()
        self._post_step(set())

    def reset_swap_buffers(self):
        self.calls.append("reset")
        for sub_group_id in range(len(self.fp16_groups)):
            self._prepare_sub_group(sub_group_id, set())
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
            self._release_sub_group(sub_group_id, set())
        self._finish_write()

    def _prepare_sub_group(self, sub_group_id, timer_names):
        if self._swappable_optimizer_subgroup(sub_group_id):
            self.swapped_in.append(sub_group_id)
            buffer = self.optimizer_swapper.swap_buffer_manager.allocate()
            buffer.copy_(self.info(sub_group_id).read())
            master = self.fp32_partitioned_groups_flat[sub_group_id]
            master.data, master.grad, self.current = buffer, torch.zeros(NUMEL), buffer

    def _release_sub_group(self, sub_group_id, timer_names):
        if self._swappable_optimizer_subgroup(sub_group_id):
            self._finish_write()
            self.info(sub_group_id).release_unswapped_gradients()
            self.fp32_partitioned_groups_flat[sub_group_id].grad = None
            self.writing = sub_group_id, self.current
            if not self.pipelined:
                self._finish_write()
                self.fp32_partitioned_groups_flat[sub_group_id].data = torch.empty(0)

    def _finish_write(self):
        if self.writing is not None:
            (sub_group_id, buffer), self.writing = self.writing, None
            self.info(sub_group_id).write(buffer)
            self.optimizer_swapper.swap_buffer_manager.free(buffer)
