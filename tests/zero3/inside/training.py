"""Real ZeRO-3 on one rank, by DeepSpeed alone and attached: copies in the middle of DeepSpeed's functions.

Usage: ``training.py CASE``. Ends with status 0 where both are the same, bit for bit, and the copies were served.
"""

import contextlib
import functools
import tempfile
import types
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.superoffload import superoffload_stage3

from tests.zero3.gradients.training import LAYERS, WIDTH, Run
from tests.zero3.launching import main_of
from transfer.zero3 import summary
from transfer.zero3.attachments import attachments

DIRECT = {"strategy": "pinned_direct", "fallback": True}


def iterate(run, seed):
    batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
    run.engine.backward(run.engine(batch, range(LAYERS)).float().pow(2).mean())
    run.engine.step()


def state(run):
    run.accelerator.synchronize()
    flat = (*run.zero.fp16_partitioned_groups_flat, *run.zero.fp32_partitioned_groups_flat)
    return [each.detach().clone() for each in flat]


@contextlib.contextmanager
def counting(run):
    """What the transfer copies within the block: the elements of each; nothing where there is no transfer."""
    copied = []
    attachment = attachments.get(run.zero)
    if attachment is None:
        yield copied
        return
    transfer = attachment.transfer
    submit, copy = transfer.submit, transfer.copy

    def counting_copy(destination, source):
        copied.append(source.numel())
        copy(destination, source)

    def counting_submit(destination, source):
        copied.append(source.numel())
        return submit(destination, source)

    transfer.copy, transfer.submit = counting_copy, counting_submit
    try:
        yield copied
    finally:
        del transfer.copy, transfer.submit


def both(train, case=None, making=contextlib.nullcontext):
    """What ``train`` gives of a run by DeepSpeed alone and of one that is attached, each made within ``making()``."""
    results = []
    for attached in (False, True):
        with making():
            run = Run({"transfer": DIRECT, **(case or {})}, attached, 0)
        results.append(train(run))
        run.engine.destroy()
    return results


def same(one, other):
    assert len(one) == len(other) > 0
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def scrambled(run):
    """Other values in each low-precision partition, so that what is restored is seen to be."""
    for partition in run.zero.fp16_partitioned_groups_flat:
        partition.fill_(-7)


def restored(run, folder, **options):
    """What is there after a checkpoint of the first step was loaded after the second, and after a third."""
    with counting(run) as copied:
        scrambled(run)
        run.engine.load_checkpoint(folder, **options)
        loaded = state(run)
    iterate(run, 3)
    return copied, [*loaded, *state(run)]


def a_checkpoint():
    with tempfile.TemporaryDirectory() as folder:

        def train(run):
            iterate(run, 1)
            run.engine.save_checkpoint(folder)
            before = state(run)
            iterate(run, 2)
            copied, after = restored(run, folder)
            same(before, after[: len(before)])
            return copied, after, [each.numel() for each in run.zero.fp32_partitioned_groups_flat]

        (_, alone, _), (copied, attached, masters) = both(train)
        same(alone, attached)
        assert copied[: len(masters)] == masters, "each whole master was restored by the transfer"


def a_universal_checkpoint():
    from deepspeed.checkpoint import ds_to_universal

    with tempfile.TemporaryDirectory() as folder:
        made = Run({}, False, 0)
        iterate(made, 1)
        made.engine.save_checkpoint(folder, tag="one")
        before = state(made)
        made.engine.destroy()
        options = {
            "input_folder": f"{folder}/one",
            "output_folder": f"{folder}/universal",
            "num_extract_workers": 1,
            "num_merge_workers": 1,
            "keep_temp_folder": False,
            "strict": True,
            "inject_missing_state": False,
        }
        ds_to_universal.main(types.SimpleNamespace(**options))
        Path(folder, "latest_universal").write_text("universal")
        case = {"deepspeed": {"checkpoint": {"load_universal": True}}}

        def train(run):
            iterate(run, 2)
            copied, after = restored(run, folder, tag="universal")
            same(before, after[: len(before)])
            return copied, after, [each.numel() for each in run.zero.fp32_partitioned_groups_flat]

        (_, alone, _), (copied, attached, masters) = both(train, case)
        same(alone, attached)
        assert copied[: len(masters)] == masters

        def train_parameters_alone(run):
            iterate(run, 2)
            copied, after = restored(run, folder, tag="universal", load_optimizer_states=False)
            same(before, after[: len(before)])
            return copied, after, sum(each.ds_numel for each in run.parameters)

        if hasattr(made.zero, "load_module_checkpoint_state_from_checkpoint_dir_stage3"):
            (_, alone, _), (copied, attached, elements) = both(train_parameters_alone, case)
            same(alone, attached)
            # Those for the masters too, as host and device are one for DeepSpeed here.
            assert sum(copied[: 2 * len(made.parameters)]) == 2 * elements


def states_that_were_offloaded():
    """On the simulated device ``to`` gives the same tensor; here, what was offloaded is moved to the host indeed."""

    def train(run):
        iterate(run, 1)
        run.engine.offload_states(pin_memory=False)
        buffer = run.zero.lp_param_buffer
        on_host = buffer.data.clone()
        buffer.data.fill_(-7)
        buffer.data = on_host
        with counting(run) as copied:
            run.engine.reload_states()
        reloaded = buffer.data.clone()
        if not attachments.get(run.zero):
            for partition in run.zero.fp16_partitioned_groups_flat:
                run.accelerator.adopt(partition)
        for seed in (2, 3):
            iterate(run, seed)
        return copied, [reloaded, *state(run)]

    (_, alone), (copied, attached) = both(train)
    same(alone, attached)
    assert copied == [alone[0].numel()]


def superoffload():
    """Masters are updated by another process: in a step where gradients are clipped, else in backward."""

    def train(run):
        stream = types.SimpleNamespace(synchronize=lambda: None)
        deepspeed.accelerator.get_accelerator().current_stream = lambda *_: stream
        seen = []
        with counting(run) as copied:
            for step, clip in enumerate((0.01, 0.01, 0.0, 0.0, 0.01)):
                run.zero.clip_grad = clip
                iterate(run, step)
                seen += state(run)
        said = attachments.get(run.zero)
        run.zero.superoffload_cpu_optimizer.close()  # which `destroy` leaves
        if said is None:
            return copied, seen, None
        record = summary.of(said)
        return copied, seen, (said._said, said.transfer.page_locked_bytes, record.asked, record.served)

    case = {"offload": {"super_offload": True}}
    making = functools.partial(mock.patch.object, superoffload_stage3, "_validate_superoffload_accelerator")
    (_, alone, _), (copied, attached, (waits_because, locked, asked, served)) = both(train, case, making)
    same(alone, attached)
    assert waits_because is None, waits_because
    masters = alone[len(alone) // 10 : len(alone) // 5]
    assert len(copied) == asked == served == 5 * len(masters)
    assert locked == sum(each.nbytes for each in masters)


CASES = (a_checkpoint, a_universal_checkpoint, states_that_were_offloaded, superoffload)

if __name__ == "__main__":
    main_of(CASES)
