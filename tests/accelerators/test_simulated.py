"""What the simulated accelerator promises beyond the conformance suite."""

import gc
import threading

import pytest
import torch

from accelerators import AcceleratorError, InFlightError
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from tests.running import run_program


def pinned_values(accelerator, values):
    tensor = accelerator.pin_empty(len(values), dtype=torch.float32)
    tensor.copy_(torch.tensor(values))
    return tensor


def test_a_pinned_copy_is_late(simulated):
    destination = simulated.device_empty(3, dtype=torch.float32)
    destination.fill_(-1)
    simulated.enqueue_copy(destination, pinned_values(simulated, [1.0, 2, 3]))
    assert destination.tolist() == [-1, -1, -1]
    simulated.current_stream().synchronize()
    assert destination.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pageable_copy_blocks_and_keeps_the_streams_order(simulated, dtype):
    destination = simulated.device_empty(3, dtype=torch.float32)
    simulated.enqueue_copy(destination, pinned_values(simulated, [1.0, 2, 3]))
    simulated.enqueue_copy(destination, torch.tensor([4.0, 5, 6], dtype=dtype))
    assert destination.tolist() == [4, 5, 6]


def test_a_cast_from_pinned_host_memory_blocks(simulated):
    destination = simulated.device_empty(3, dtype=torch.bfloat16)
    simulated.enqueue_copy(destination, pinned_values(simulated, [1.0, 2, 3]))
    assert destination.tolist() == [1, 2, 3]


def test_device_copies_are_late_and_may_cast(simulated):
    source = simulated.device_empty(3, dtype=torch.float32)
    source.copy_(torch.tensor([1.0, 2, 3]))
    destination = simulated.device_empty(3, dtype=torch.bfloat16)
    destination.fill_(-1)
    simulated.enqueue_copy(destination, source)
    assert destination.tolist() == [-1, -1, -1]
    simulated.synchronize()
    assert destination.tolist() == [1, 2, 3]


def test_copies_back_to_the_host(simulated):
    source = simulated.device_empty(2, dtype=torch.float32)
    source.copy_(torch.tensor([1.0, 2]))
    pageable, pinned = torch.zeros(2), pinned_values(simulated, [0.0, 0])
    simulated.enqueue_copy(pageable, source)
    assert pageable.tolist() == [1, 2]
    simulated.enqueue_copy(pinned, source)
    assert pinned.tolist() == [0, 0]
    simulated.synchronize()
    assert pinned.tolist() == [1, 2]


def test_registered_memory_is_read_late(simulated):
    source, destination = torch.ones(3), simulated.device_empty(3, dtype=torch.float32)
    simulated.register_host_memory(source.data_ptr(), source.nbytes)
    simulated.enqueue_copy(destination, source)
    source.fill_(9)
    simulated.synchronize()
    assert destination.tolist() == [9, 9, 9]


def test_pinned_bytes_count_pinning_and_registering(simulated):
    buffer, memory = simulated.pin_empty(10, dtype=torch.float16), torch.zeros(5)
    simulated.register_host_memory(memory.data_ptr(), memory.nbytes)
    assert simulated.pinned_bytes == 20 + 20
    simulated.unpin_memory(buffer)
    simulated.unregister_host_memory(memory.data_ptr())
    assert simulated.pinned_bytes == 0


def test_unpinning_takes_the_base_tensor_once(simulated):
    buffer = simulated.pin_empty(10, dtype=torch.float32)
    assert simulated.unpin_memory(buffer[2:5]) is False
    assert simulated.unpin_memory(buffer[:5]) is False
    assert simulated.is_pinned(buffer[2:5])
    assert not simulated.is_pinned(buffer[:0])
    assert simulated.unpin_memory(buffer) is True
    assert simulated.unpin_memory(buffer) is False
    assert not simulated.is_pinned(buffer)


def test_an_interrupted_unpin_can_be_repeated(simulated, monkeypatch):
    buffer = simulated.pin_empty(10, dtype=torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(simulated._pinned, "remove", lambda address: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            simulated.unpin_memory(buffer)
    assert simulated.unpin_memory(buffer)
    assert simulated.pinned_bytes == 0


def test_pinned_memory_that_is_only_dropped_stays_counted(simulated):
    simulated.pin_empty(10, dtype=torch.float32)
    gc.collect()
    assert simulated.pinned_bytes == 40


def test_giving_back_memory_in_flight_is_noticed(simulated):
    buffer, destination = pinned_values(simulated, [1.0, 2]), simulated.device_empty(2, dtype=torch.float32)
    simulated.enqueue_copy(destination, buffer)
    with pytest.raises(InFlightError):
        simulated.unpin_memory(buffer)
    assert simulated.is_pinned(buffer)
    simulated.synchronize()
    assert simulated.unpin_memory(buffer)

    memory = torch.ones(2)
    simulated.register_host_memory(memory.data_ptr(), memory.nbytes)
    simulated.enqueue_copy(destination, memory)
    with pytest.raises(InFlightError):
        simulated.unregister_host_memory(memory.data_ptr())
    simulated.synchronize()
    simulated.unregister_host_memory(memory.data_ptr())
    assert simulated.pinned_bytes == 0


def test_registering_nothing_or_twice_is_refused(simulated):
    memory = torch.zeros(100)
    with pytest.raises(ValueError, match="0 bytes"):
        simulated.register_host_memory(memory.data_ptr(), 0)
    simulated.register_host_memory(memory.data_ptr(), memory.nbytes)
    with pytest.raises(RuntimeError, match="pinned already"):
        simulated.register_host_memory(memory.data_ptr() + 4, 8)
    with pytest.raises(RuntimeError, match="no registered"):
        simulated.unregister_host_memory(memory.data_ptr() + 4)


def test_the_limit_is_like_a_memlock_limit():
    accelerator = SimulatedAccelerator(pin_limit_bytes=100)
    first = accelerator.pin_empty(20, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="cannot pin 40 bytes: 80 of 100"):
        accelerator.pin_empty(10, dtype=torch.float32)
    memory = torch.zeros(10)
    with pytest.raises(RuntimeError, match="cannot pin"):
        accelerator.register_host_memory(memory.data_ptr(), memory.nbytes)
    accelerator.unpin_memory(first)
    assert accelerator.pin_empty(10, dtype=torch.float32).numel() == 10


def test_fresh_memory_is_poisoned(simulated):
    for tensor in (simulated.device_empty(4, dtype=torch.bfloat16), simulated.pin_empty(4, dtype=torch.float32)):
        assert tensor.isnan().all()


def test_adopted_tensors_are_device_memory_while_they_live(simulated):
    tensor = torch.zeros(1000)
    assert simulated.adopt(tensor) is tensor
    assert simulated.on_device(tensor[10:20])
    assert not simulated.on_host(tensor)
    simulated.adopt(tensor[5:])
    view = tensor[1:]
    del tensor
    gc.collect()
    assert simulated.on_device(view)
    del view
    gc.collect()
    # The next tensors get the same memory from the allocator, and are on the host.
    assert all(simulated.on_host(torch.zeros(1000)) for _ in range(50))


def test_adopted_tensors_stay_adopted_when_resized(simulated):
    tensor = simulated.adopt(torch.zeros(2**16))
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    others = [torch.zeros(2**16) for _ in range(20)]
    assert all(simulated.on_host(other) for other in others)
    storage.resize_(size)
    assert simulated.on_device(tensor)


@pytest.mark.parametrize("seed", range(10))
def test_a_collected_waiter_does_not_confuse_a_wait(seed):
    """A finalizer that waits, run by the release of what a copy held, while another wait is at work."""
    import weakref

    simulated = SimulatedAccelerator(seed)
    streams = [simulated.Stream() for _ in range(3)]
    destination = simulated.device_empty(12, dtype=torch.float32)
    for index, stream in enumerate(streams * 4):
        source = pinned_values(simulated, [float(index)])
        temporary = simulated.device_empty(1, dtype=torch.float32)
        with simulated.stream(stream):
            simulated.enqueue_copy(temporary, source)
            simulated.enqueue_copy(destination[index : index + 1], temporary)
        weakref.finalize(temporary.untyped_storage(), streams[(index + 1) % 3].synchronize)
        del temporary
    simulated.synchronize()
    assert destination.tolist() == list(range(12))


def test_events_follow_the_recording_not_the_object(simulated):
    event = simulated.Event()
    assert event.query()
    event.synchronize()
    destination, source = simulated.device_empty(1, dtype=torch.float32), pinned_values(simulated, [1.0])
    destination.fill_(0)
    event.record()
    simulated.enqueue_copy(destination, source)
    event.synchronize()
    assert destination.tolist() == [0]
    event.record()
    event.synchronize()
    assert destination.tolist() == [1]


def test_queries_answer_first_and_then_make_progress(simulated):
    destination = simulated.device_empty(3, dtype=torch.float32)
    for index in range(3):
        simulated.enqueue_copy(destination[index : index + 1], pinned_values(simulated, [float(index)]))
    event = simulated.Event()
    event.record()
    answers = [event.query() for _ in range(6)]
    assert answers == [False, False, False, False, True, True]
    assert destination.tolist() == [0, 1, 2]
    assert simulated.current_stream().query()


def test_the_current_stream_is_the_threads_own(simulated):
    seen = []
    with simulated.stream(simulated.Stream()):
        thread = threading.Thread(target=lambda: seen.append(simulated.current_stream()))
        thread.start()
        thread.join(10)
        assert seen[0] is not simulated.current_stream()


def test_without_streams_or_events():
    bare = SimulatedAccelerator(streams=False, events=False)
    assert bare.Stream is None
    assert bare.Event is None
    assert bare.current_stream() is None
    assert not bare.capabilities.streams
    assert bare.capabilities.why_not("events") == "This simulated accelerator was made without events."


def test_faults_can_be_injected_anywhere_and_go_away(simulated):
    with failing(simulated, "pin_empty", MemoryError("full"), after=1, times=2) as calls:
        simulated.pin_empty(1, dtype=torch.float32)
        for _ in range(2):
            with pytest.raises(MemoryError, match="full"):
                simulated.pin_empty(1, dtype=torch.float32)
        simulated.pin_empty(1, dtype=torch.float32)
    assert len(calls) == 4
    with failing(simulated, "Event.record", RuntimeError("broken")), pytest.raises(RuntimeError, match="broken"):
        simulated.Event().record()
    simulated.Event().record()
    assert "pin_empty" not in vars(simulated)


def test_in_flight_error_is_catchable_both_ways():
    assert issubclass(InFlightError, AcceleratorError)
    assert issubclass(InFlightError, RuntimeError)


@pytest.mark.slow
def test_a_signal_handler_may_wait_at_any_moment():
    program = """
        import signal, torch
        from accelerators.simulated import SimulatedAccelerator
        from transfer import PinnedStagedTransfer, TransferBusyError

        simulated = SimulatedAccelerator()
        transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=64)
        outer, inner = (simulated.device_empty(3200, dtype=torch.float32) for _ in range(2))
        values = torch.arange(3200.0)
        handled, busy = [], []

        def handler(*_):
            try:
                transfer.copy(inner, -values)
            except TransferBusyError:
                busy.append(1)
            else:
                handled.append(torch.equal(inner, -values))

        signal.signal(signal.SIGALRM, handler)
        for delay in range(0, 200, 2):
            outer.fill_(-5)
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + delay * 1e-5)
            transfer.copy(outer, values)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert torch.equal(outer, values), delay
        assert len(handled) + len(busy) > 20 and busy and all(handled)
        transfer.close()
        assert simulated.pinned_bytes == 0
    """
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_eager_copies_read_their_source_when_they_are_queued():
    for eager, expected in ((True, [1.0] * 4), (False, [2.0] * 4)):
        simulated = SimulatedAccelerator(eager=eager)
        source, destination = (
            simulated.pin_empty(4, dtype=torch.float32).fill_(1),
            simulated.device_empty(4, dtype=torch.float32),
        )
        simulated.enqueue_copy(destination, source)
        source.fill_(2)
        simulated.synchronize()
        assert destination.tolist() == expected
