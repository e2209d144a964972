"""Real ZeRO-3 on one rank, whose gradients go to the host once, and what fails or ends on the way.

Usage: ``interrupted.py CASE``. Ends with status 0 where what is promised holds.
"""

import gc
import weakref

import pytest
import torch

from tests.zero3.gradients.training import DIRECT, LAYERS, WIDTH, Run, look
from tests.zero3.launching import main_of
from transfer import build_transfer, zero3
from transfer.zero3.attachments import attachments
from transfer.zero3.gradients import LazyGradient


class RefusedError(Exception):
    """What a vendor raises."""


def failing_after(number, method):
    """The method, which fails at one of its calls; with the number of calls."""
    calls = [0]

    def fails(*arguments, **options):
        calls[0] += 1
        if calls[0] == number:
            raise RefusedError
        return method(*arguments, **options)

    return fails, calls


def batch(run, seed):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def iterate(run, seed):
    run.engine.backward(run.engine(batch(run, seed), range(LAYERS)).float().pow(2).mean())
    run.engine.step()


def state(run):
    zero = run.zero
    optimizer_states = [zero.optimizer.state[each] for each in zero.fp32_partitioned_groups_flat]
    return [
        *(each.data.clone() for each in zero.fp32_partitioned_groups_flat),
        *(each.clone() for each in zero.fp16_partitioned_groups_flat),
        *(each["exp_avg_sq"].clone() for each in optimizer_states),
    ]


def same(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def a_copy_fails_in_a_step():
    """At each tile in turn: the master is updated once, whole, and the next step is right."""
    whole = {}
    for steps in (1, 2):
        alone = Run({}, False, 0)
        for seed in range(1, steps + 1):
            iterate(alone, seed)
        whole[steps] = [each.data.clone() for each in alone.zero.fp32_partitioned_groups_flat]
        alone.engine.destroy()
    number = 0
    while True:
        number += 1
        run = Run({}, True, 0)
        iterate(run, 1)
        run.engine.backward(run.engine(batch(run, 2), range(LAYERS)).float().pow(2).mean())
        transfer = attachments.get(run.zero).transfer
        submit = transfer.submit
        transfer.submit, _ = failing_after(number, submit)
        try:
            run.engine.step()
        except RefusedError:
            transfer.submit = submit
            assert all(type(each.grad) is LazyGradient for each in run.zero.fp32_partitioned_groups_flat)
            check_masters(run, whole)
        else:
            break
        transfer.close()
        run.accelerator.synchronize()
        run.engine.destroy()
    assert number > 5, number


def check_masters(run, whole):
    """Each was updated once or twice, whole, and nothing is on its way."""
    assert not run.accelerator._queue.pending_tensors()
    pairs = zip(run.zero.fp32_partitioned_groups_flat, run.zero.fp16_partitioned_groups_flat, strict=True)
    for index, (master, partition) in enumerate(pairs):
        steps = run.zero.optimizer.state[master]["step"]
        assert torch.equal(master.data, whole[steps][index])
        assert partition.isfinite().all()


def what_fails_in_backward_is_raised_before_anything_is_updated():
    run = Run({}, True, 0)
    iterate(run, 1)
    before = state(run)
    run.engine.backward(run.engine(batch(run, 2), range(LAYERS)).float().pow(2).mean())
    event = attachments.get(run.zero).gradients._events[-1]
    wait = event.synchronize
    event.synchronize, _ = failing_after(1, wait)
    with pytest.raises(RefusedError):
        run.engine.step()
    assert same(state(run), before)
    run.engine.step()  # the next wait is granted
    assert not same(state(run), before)
    run.engine.destroy()


def an_attach_that_fails_changes_nothing():
    """Whatever of the accelerator fails while DeepSpeed's buffers are taken over."""
    expected = Run({}, False, 0)
    for seed in (1, 2, 3):
        iterate(expected, seed)
    run = Run({}, False, 0)
    iterate(run, 1)
    run.attached = True
    original, failed = run.accelerator.on_host, 0
    run.accelerator.on_host, calls = failing_after(0, original)
    run.attach()
    zero3.detach(run.engine)
    for number in range(1, calls[0] + 1):
        run.accelerator.on_host, _ = failing_after(number, original)
        try:
            run.attach()
        except RefusedError:
            failed += 1
            assert attachments.get(run.zero) is None
        else:  # where only the best way was asked for
            zero3.detach(run.engine)
        run.accelerator.on_host = original
        assert all(type(each.grad) is torch.Tensor for each in run.zero.fp32_partitioned_groups_flat)
    assert failed > 10
    for seed in (2, 3):
        iterate(run, seed)
    assert same(state(run), state(expected))
    run.engine.destroy()
    expected.engine.destroy()


def an_optimizer_that_is_dropped_is_freed():
    run = Run({}, True, 0)
    iterate(run, 1)
    gone = weakref.ref(attachments.get(run.zero).gradients)
    attachments.get(run.zero).transfer.close()
    run.engine.destroy()
    assert all(each.grad is None for each in run.zero.fp32_partitioned_groups_flat)
    gc.collect()
    assert gone() is None, "what it held of gradients goes with the attachment"


def it_all_comes_back_when_it_is_detached():
    """After a step, and in the middle of the next one: what is accumulated is in the second buffer, and the first."""
    for number in (2, 3):
        detached_after(number)


def detached_after(number):
    run = Run({"micro_steps": 2}, True, 0)
    for micro_step in range(number):
        run.engine.backward(run.engine(batch(run, micro_step), range(LAYERS)).float().pow(2).mean())
        run.engine.step()
    look(run)
    expected, run.seen = run.seen, []
    zero3.detach(run.engine)
    look(run)
    for (_, one), (_, other) in zip(expected, run.seen, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    zero, flat = run.zero, run.zero.grad_partitions_flat_buffer
    assert all(type(each.grad) is torch.Tensor for each in zero.fp32_partitioned_groups_flat)
    assert all(run.accelerator.is_pinned(each.grad) for each in zero.fp32_partitioned_groups_flat), (
        "as DeepSpeed made it"
    )
    views = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values()
    assert all(each.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for each in views)
    run.engine.destroy()


def another_transfer_that_is_refused_changes_nothing():
    """What is accumulated is not pinned here, so that each transfer page-locks it; the second one may not."""
    expected = Run({"pin": False, "micro_steps": 2}, False, 0)
    run = Run({"pin": False, "micro_steps": 2}, True, 0)
    for each in (expected, run):
        iterate(each, 1)
    first = attachments.get(run.zero)
    gradients, transfer = first.gradients, first.transfer
    second = build_transfer(DIRECT, run.accelerator)
    prepare, locked = second.prepare, set()

    def refuses(source):
        if source.dtype == torch.bfloat16:
            raise RefusedError
        locked.add(source.data_ptr())
        prepare(source)

    second.prepare = refuses
    with pytest.raises(RefusedError):
        zero3.attach(run.engine, second)
    assert locked, "masters first"
    assert attachments.get(run.zero) is first
    assert (first.gradients, first.transfer) == (gradients, transfer)
    for seed in range(2, 6):
        for each in (expected, run):
            iterate(each, seed)
    assert same(state(run), state(expected))
    for each in (expected, run):
        each.engine.destroy()


def pinned_memory_is_given_back():
    run = Run({}, False, 0)
    numel = sum(each.numel() for each in run.zero.fp32_partitioned_groups_flat)
    before = run.accelerator.pinned_bytes
    run.attached = True
    run.attach()
    locked = attachments.get(run.zero).transfer.pinned_bytes
    assert attachments.get(run.zero).gradients.saved_bytes == 4 * numel
    assert run.accelerator.pinned_bytes - locked == before - 4 * numel
    run.engine.destroy()


def buffers_are_page_locked_again_where_the_transfer_was_closed():
    run = Run({"pin": False}, True, 0)
    buffer, transfer = run.zero.grad_partitions_flat_buffer, attachments.get(run.zero).transfer
    iterate(run, 1)
    assert run.accelerator.is_pinned(buffer)
    transfer.close()  # as another engine does that shares it
    assert not run.accelerator.is_pinned(buffer)
    iterate(run, 2)
    assert run.accelerator.is_pinned(buffer)
    run.engine.destroy()
    assert transfer.pinned_bytes == 0


CASES = (
    a_copy_fails_in_a_step,
    what_fails_in_backward_is_raised_before_anything_is_updated,
    an_attach_that_fails_changes_nothing,
    an_optimizer_that_is_dropped_is_freed,
    it_all_comes_back_when_it_is_detached,
    another_transfer_that_is_refused_changes_nothing,
    pinned_memory_is_given_back,
    buffers_are_page_locked_again_where_the_transfer_was_closed,
)

if __name__ == "__main__":
    main_of(CASES)
