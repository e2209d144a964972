"""Who holds a page-lock, and until when: threads, finalizers, storages that move, and storages over the same memory."""

import gc
import time
from random import Random

import numpy as np
import pytest
import torch

from accelerators import AcceleratorError
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from tests.running import run_program, run_threads
from tests.transfer.direct_tools import MODES, direct, empty
from transfer import StrategyUnavailableError, TransferBusyError, TransferError, build_transfer


def slowed(simulated, seconds=0.002):
    """Page-locking takes time, in which other threads run."""
    register = simulated.register_host_memory
    simulated.register_host_memory = lambda *range_: (time.sleep(seconds), register(*range_))[1]


@pytest.mark.parametrize("shared", [False, True], ids=["masters of their own", "the same masters"])
def test_two_threads_page_lock_at_once(shared):
    for seed in range(3):
        simulated = SimulatedAccelerator(seed)
        slowed(simulated)
        transfers = [direct(simulated), direct(simulated)]
        masters = [[torch.zeros(5000) for _ in range(8)] for _ in transfers]
        if shared:
            masters[1] = masters[0]
        errors = []

        def work(index, transfers=transfers, masters=masters, errors=errors):
            try:
                for master in masters[index]:
                    transfers[index].prepare(master)
            except Exception as error:  # noqa: BLE001
                errors.append(error)

        run_threads(work, range(2))
        assert errors == []
        assert all(simulated.is_pinned(master) for each in masters for master in each)
        assert [transfer.page_locked_bytes for transfer in transfers] == [8 * 20_000] * 2
        transfers[0].close()
        assert all(simulated.is_pinned(master) for master in masters[1])
        transfers[1].close()
        assert simulated.pinned_bytes == 0


@MODES
def test_a_second_storage_over_the_same_memory_joins(simulated, mapped):
    memory = np.arange(4096, dtype=np.float32)
    first, second = torch.from_numpy(memory), torch.from_numpy(memory)
    part = torch.from_numpy(memory[1000:2000])
    transfer = direct(simulated, mapped=mapped)
    transfer.prepare(first)
    transfer.prepare(second)
    assert transfer.page_locked_bytes == simulated.pinned_bytes == 4 * 4096, "the memory counts once"
    destination = empty(simulated, 4096)
    copy = transfer.submit(destination, second)
    del first
    gc.collect()  # giving it back under the copy would be an InFlightError
    assert simulated.pinned_bytes == 4 * 4096
    copy.wait()
    assert torch.equal(destination, second.bfloat16())
    transfer.copy(destination[:1000], part)  # joins, though nothing has prepared it
    assert torch.equal(destination[:1000], part.bfloat16())
    transfer.unprepare(second)
    assert simulated.pinned_bytes == 4 * 4096, "the part has been copied from"
    transfer.unprepare(part)
    assert simulated.pinned_bytes == transfer.page_locked_bytes == 0


def test_memory_that_is_page_locked_in_part_is_refused(simulated):
    memory = np.zeros(4096, dtype=np.float32)
    part, whole = torch.from_numpy(memory[:1000]), torch.from_numpy(memory)
    transfer = direct(simulated)
    transfer.prepare(part)
    with pytest.raises(StrategyUnavailableError, match="part of it is page-locked"):
        transfer.prepare(whole)
    another = torch.zeros(10)
    transfer.prepare(another)
    assert transfer.page_locked_bytes == 4000 + 40
    transfer.close()
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("how", ["share_memory_", "resize_"])
def test_memory_that_moved_is_given_back_when_it_is_prepared_again(simulated, how):
    transfer = direct(simulated)
    source, destination = torch.arange(100_000.0), empty(simulated, 100_000)
    transfer.prepare(source)
    before = source.data_ptr()
    neighbour = torch.zeros(10)
    if how == "resize_":
        source.untyped_storage().resize_(800_000)
    else:
        source.share_memory_()
    assert source.data_ptr() != before
    transfer.prepare(neighbour)
    transfer.prepare(source)
    assert simulated._registered.size_at(before) is None
    assert simulated.pinned_bytes == transfer.page_locked_bytes == source.untyped_storage().nbytes() + 40
    transfer.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())


def test_unprepare_gives_back_memory_that_has_moved(simulated):
    transfer = direct(simulated)
    source = torch.arange(1000.0)
    transfer.prepare(source)
    source.share_memory_()
    transfer.unprepare(source)
    assert simulated.pinned_bytes == transfer.page_locked_bytes == 0


def test_a_neighbour_on_the_same_page_keeps_its_page_lock(simulated):
    """Unpreparing what shares a page with it, but was never prepared."""
    memory = torch.zeros(4096, dtype=torch.uint8).numpy()
    prepared, other = torch.from_numpy(memory[:64]), torch.from_numpy(memory[64:128])
    transfer = direct(simulated)
    transfer.prepare(prepared)
    transfer.unprepare(other)
    assert transfer.page_locked_bytes == 64


def test_a_finalizer_between_two_locks_is_no_deadlock():
    """A holds a transfer and waits to page-lock; B page-locks, and collects an optimizer that used A's transfer."""
    done = run_program(
        """
        import faulthandler, gc, os, threading, types, torch
        from accelerators.simulated import SimulatedAccelerator
        from transfer import PinnedDirectTransfer
        from transfer.memory import host_budget
        from transfer.zero3.stage3 import Stage3
        from transfer.zero3.swapped.swap_buffers import SwapBuffers

        faulthandler.dump_traceback_later(20, exit=True)
        simulated = SimulatedAccelerator()
        first, second = (PinnedDirectTransfer(accelerator=simulated) for _ in range(2))

        class Optimizer:
            pass

        def garbage():
            optimizer = Optimizer()
            optimizer.cycle = optimizer
            manager = types.SimpleNamespace(all_buffers=[torch.zeros(1000)])
            optimizer.optimizer_swapper = types.SimpleNamespace(swap_buffer_manager=manager)
            SwapBuffers(first).prepare(Stage3(optimizer))

        gc.disable()
        garbage()
        assert simulated.pinned_bytes == 4000
        registering, waiting = threading.Event(), threading.Event()
        register = simulated.register_host_memory

        def slow(address, num_bytes):
            if threading.current_thread().name == "B":
                registering.set()
                assert waiting.wait(10)
                gc.collect()
            return register(address, num_bytes)

        simulated.register_host_memory = slow
        budget = host_budget.page_lock_budget_bytes

        def asked():
            if threading.current_thread().name == "A":
                waiting.set()  # A holds its transfer
            return budget()

        host_budget.page_lock_budget_bytes = asked

        def a():
            registering.wait(10)
            first.prepare(torch.zeros(5000))

        threads = [
            threading.Thread(target=a, name="A", daemon=True),
            threading.Thread(target=lambda: second.prepare(torch.zeros(7000)), name="B", daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        print("alive" if any(thread.is_alive() for thread in threads) else "ended")
        first.close()
        second.close()
        print(simulated.pinned_bytes, flush=True)
        os._exit(0)
        """,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["ended", "0"]), done.stderr


@pytest.mark.parametrize("dies", ["storage", "transfer"])
def test_what_dies_while_memory_is_page_locked_is_given_back_afterwards(simulated, dies):
    """The collector may run inside `register_host_memory`, in the middle of a change."""
    mine = {"transfer": direct(simulated), "storage": torch.zeros(1000)}
    mine["transfer"].prepare(mine["storage"])
    other, register, during = direct(simulated), simulated.register_host_memory, []

    def collecting(address, num_bytes):
        mine.pop(dies)
        gc.collect()
        during.append(simulated.pinned_bytes)
        return register(address, num_bytes)

    simulated.register_host_memory = collecting
    source = torch.zeros(500)
    other.prepare(source)
    assert during == [4000], "not in the middle of the change"
    assert simulated.pinned_bytes == other.page_locked_bytes == 2000


def test_what_asks_in_the_middle_of_a_change_is_refused_or_done_after_it(simulated):
    first, second = direct(simulated), direct(simulated)
    kept, source, destination = torch.zeros(100), torch.arange(1000.0), empty(simulated, 1000)
    second.prepare(kept)
    register, refused = simulated.register_host_memory, []

    def signalled(address, num_bytes):  # as a signal handler would be
        second.unprepare(kept)
        for ask in (lambda: second.prepare(torch.zeros(10)), lambda: second.copy(destination[:100], kept)):
            with pytest.raises(TransferBusyError):
                ask()
        refused.append(simulated.pinned_bytes)
        return register(address, num_bytes)

    simulated.register_host_memory = signalled
    first.prepare(source)
    simulated.register_host_memory = register
    assert refused == [400], "both, and nothing has changed"
    assert simulated.pinned_bytes == first.page_locked_bytes == 4000
    first.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())


@pytest.mark.parametrize("call", ["register_host_memory", "unregister_host_memory"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_loses_no_registration(simulated, call, when):
    transfer = direct(simulated)
    source, original = torch.arange(1000.0), getattr(simulated, call)
    if call == "unregister_host_memory":
        transfer.prepare(source)

    def interrupted(*arguments):
        setattr(simulated, call, original)
        if when == "after":
            original(*arguments)
        raise KeyboardInterrupt

    setattr(simulated, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        transfer.prepare(source) if call == "register_host_memory" else transfer.unprepare(source)
    assert transfer.page_locked_bytes in (0, 4000)
    destination = empty(simulated, 1000)
    transfer.prepare(source)
    transfer.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())
    transfer.close()
    assert simulated.pinned_bytes == transfer.page_locked_bytes == 0


def test_an_accelerator_that_gives_nothing_back_is_one_typed_error(simulated):
    transfer = direct(simulated)
    source = torch.zeros(1000)
    transfer.prepare(source)
    with failing(simulated, "unregister_host_memory", AcceleratorError("the device is gone"), times=99):
        for ask in (lambda: transfer.unprepare(source), transfer.close):
            with pytest.raises(TransferError, match="the device is gone"):
                ask()
    assert transfer.page_locked_bytes == 4000
    transfer.close()
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("what", ["prepare", "unprepare"])
def test_time_is_in_proportion_to_the_number_of_sources(what):
    def seconds(number):
        simulated = SimulatedAccelerator()
        with direct(simulated, max_page_locked=2**40) as transfer:
            sources = [torch.zeros(16) for _ in range(number)]
            started = time.process_time()
            for source in sources:
                transfer.prepare(source)
            prepared = time.process_time()
            for source in sources:
                transfer.unprepare(source)
            given_back = time.process_time()
            assert simulated.pinned_bytes == 0
        return prepared - started if what == "prepare" else given_back - prepared

    # Eight times as many: 64 times the time if it grew with the square.
    assert min(seconds(800) for _ in range(2)) < 24 * max(seconds(100) for _ in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True], ids=["chunks", "mapped"])
def test_threads_prepare_copy_move_drop_and_close(mapped):
    """For two seconds, on two transfers and the same sources: right values all the time, nothing left at the end."""
    simulated = SimulatedAccelerator()
    options = {"strategy": "pinned_direct", "pinned_direct": {"chunk_elements": 100, "mapped": mapped}}
    transfers = [build_transfer(options, simulated) for _ in range(2)]
    sources = [torch.arange(float(500 + 37 * index)) for index in range(12)]
    stop, errors = time.monotonic() + 2, []

    def copied(transfer, source):
        destination = empty(simulated, source.numel())
        transfer.submit(destination, source).wait()
        assert torch.equal(destination, source.bfloat16())

    def work(seed):
        random = Random(seed)
        try:
            while time.monotonic() < stop and not errors:
                transfer, what = random.choice(transfers), random.random()
                if what < 0.3:
                    transfer.prepare(random.choice(sources))
                elif what < 0.4:
                    transfer.unprepare(random.choice(sources))
                elif what < 0.7:
                    copied(transfer, random.choice(sources))
                elif what < 0.95:
                    own = torch.full((300,), float(random.randrange(99)))
                    transfer.prepare(own)
                    if what < 0.8:
                        own.share_memory_()
                    copied(transfer, own)
                else:
                    transfer.close()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    run_threads(work, range(4))
    assert errors == []
    for transfer in transfers:
        transfer.close()
    assert [transfer.pinned_bytes for transfer in transfers] == [0, 0]
    assert simulated._registered.total_bytes == 0
