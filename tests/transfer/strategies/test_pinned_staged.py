"""What ``pinned_staged`` does with its buffers, seen from the accelerator."""

import contextlib
import threading
import warnings

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from tests.running import run_python, run_threads
from tests.transfer.direct_tools import routed
from transfer import (
    ConfigError,
    FallbackWarning,
    PinnedMemoryWarning,
    PinnedStagedConfig,
    PinnedStagedTransfer,
    StrategyUnavailableError,
    TransferBusyError,
    TransferError,
    build_transfer,
)


class Recorder:
    """Notes each copy that is queued on an accelerator, and each buffer it pins."""

    def __init__(self, accelerator):
        self.copies, self.pinned, self.unpinned = [], [], []
        enqueue_copy, pin_empty, unpin_memory = (
            accelerator.enqueue_copy,
            accelerator.pin_empty,
            accelerator.unpin_memory,
        )

        def recording_copy(destination, source):
            self.copies.append((destination.numel(), destination.dtype, source.dtype, accelerator.is_pinned(source)))
            enqueue_copy(destination, source)

        def recording_pin(*size, dtype, device="cpu"):
            self.pinned.append((size, dtype))
            return pin_empty(*size, dtype=dtype, device=device)

        def recording_unpin(tensor):
            self.unpinned.append((tensor.data_ptr(), unpin_memory(tensor)))
            return self.unpinned[-1][1]

        accelerator.enqueue_copy, accelerator.pin_empty = recording_copy, recording_pin
        accelerator.unpin_memory = recording_unpin


def test_each_chunk_crosses_pinned_and_already_cast(simulated, monkeypatch):
    recorder = Recorder(simulated)
    allocated = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: allocated.append(size) or empty(*size, **kw))
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=1000) as transfer:
        destination = simulated.device_empty(10_000, dtype=torch.bfloat16)
        allocated.clear()
        transfer.copy(destination, torch.arange(10_000.0))
    assert recorder.copies == [(1000, torch.bfloat16, torch.bfloat16, True)] * 10
    assert recorder.pinned == [((1000,), torch.bfloat16)] * 2
    assert all(size in (((1000,),), (1,)) for size in allocated), "no temporary of the partition's size"
    assert torch.equal(destination, torch.arange(10_000.0).bfloat16())


@pytest.mark.parametrize("chunk", [1, 3, 9, 10, 11])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_nothing_is_pending_on_return_from_copy(simulated, chunk, buffers):
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=chunk, buffers=buffers)
    destinations = []
    for value in range(2):
        destination = simulated.device_empty(10, dtype=torch.bfloat16)
        destination.fill_(-1)
        transfer.copy(destination, torch.arange(10.0) + value)
        assert destination.tolist() == [index + value for index in range(10)]
        destinations.append(destination)
    assert destinations[0].tolist() == list(range(10))
    assert not simulated._queue.pending_tensors()


def test_submit_returns_with_the_last_chunks_in_flight(simulated):
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=3)
    destination = simulated.device_empty(10, dtype=torch.bfloat16)
    destination.fill_(-1)
    copy = transfer.submit(destination, torch.arange(10.0))
    assert not copy.done
    assert destination.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1]
    copy.wait()
    assert destination.tolist() == list(range(10))


def test_buffers_are_pinned_once_for_each_dtype(simulated):
    recorder = Recorder(simulated)
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=1000) as transfer:
        for numel in (1, 7, 999, 1000, 1001, 30_000) * 16:
            transfer.copy(simulated.device_empty(numel, dtype=torch.bfloat16), torch.zeros(numel))
        assert (
            transfer.pinned_bytes
            == simulated.pinned_bytes
            == 4000
            == PinnedStagedConfig(chunk_elements=1000).pinned_bytes(torch.bfloat16)
        )
        transfer.copy(simulated.device_empty(10, dtype=torch.float32), torch.zeros(10))
        transfer.copy(simulated.device_empty(10, dtype=torch.bfloat16), torch.zeros(10))
        assert len(recorder.pinned) == 4
        assert simulated.pinned_bytes == 4000 + 8000
    assert simulated.pinned_bytes == 0


def test_the_default_ring_pins_64_mib_for_bf16():
    # 2 buffers x 2^24 elements x 2 bytes, each buffer a power of two of bytes: nothing lost to rounding.
    assert PinnedStagedConfig().pinned_bytes(torch.bfloat16) == 67_108_864
    assert PinnedStagedConfig().pinned_bytes(torch.float32) == 134_217_728


def test_two_hundred_lives_leak_nothing(simulated):
    recorder = Recorder(simulated)
    for _ in range(200):
        transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=64)
        transfer.copy(simulated.device_empty(100, dtype=torch.bfloat16), torch.zeros(100))
        transfer.close()
    assert simulated.pinned_bytes == 0
    assert len(recorder.pinned) == 400
    assert [freed for _, freed in recorder.unpinned] == [True] * 400


@pytest.mark.parametrize("failed_after", [0, 1])
def test_refused_pinning_falls_back_with_one_warning(simulated, failed_after):
    error = RuntimeError("cudaHostAlloc: out of memory")
    transfer = routed(simulated, "pinned_staged", chunk_elements=3)
    with (
        failing(simulated, "pin_empty", error, after=failed_after, times=1000),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for value in range(20):
            destination = simulated.device_empty(10, dtype=torch.bfloat16)
            transfer.copy(destination, torch.arange(10.0) + value)
            assert destination.tolist() == [index + value for index in range(10)]
    assert simulated.pinned_bytes == transfer.pinned_bytes == 0
    assert transfer.stats()["pinned_staged"].passed_on == 20
    transfer.copy(destination, torch.zeros(10))  # tried again each time: the memory may be there by now
    assert transfer.stats()["pinned_staged"].copies == 1
    transfer.close()
    assert [warning.category for warning in caught] == [FallbackWarning]
    message = str(caught[0].message)
    assert "12 bytes of pinned memory on simulated (2 buffers of 3 torch.bfloat16 elements)" in message
    assert "cudaHostAlloc: out of memory" in message
    assert "ulimit -l" in message
    assert "pinned_staged.chunk_elements" in message
    assert "fallback: false" in message


def test_refused_pinning_is_an_error_where_no_fallback_is_wanted(simulated):
    destination = simulated.device_empty(10, dtype=torch.bfloat16)
    destination.fill_(-1)
    for transfer in (
        PinnedStagedTransfer(accelerator=simulated, chunk_elements=3),
        routed(simulated, "pinned_staged", fallback=False, chunk_elements=3),
    ):
        with failing(simulated, "pin_empty", RuntimeError("no"), after=1, times=1000):
            for _ in range(2):
                with pytest.raises(StrategyUnavailableError, match="12 bytes .* failed: no"):
                    transfer.copy(destination, torch.arange(10.0))
        assert transfer.pinned_bytes == 0
    assert simulated.pinned_bytes == 0
    assert (destination == -1).all()


def test_a_memlock_like_limit_and_the_configured_fallback():
    simulated = SimulatedAccelerator(pin_limit_bytes=10)
    destination = simulated.device_empty(10, dtype=torch.bfloat16)
    config = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 4}}
    with pytest.warns(FallbackWarning, match="cannot pin 8 bytes: 8 of 10 allowed are pinned"):
        build_transfer(config, simulated).copy(destination, torch.arange(10.0))
    assert destination.tolist() == list(range(10))
    with pytest.raises(TransferError, match="cannot pin 8 bytes"):
        build_transfer({**config, "fallback": False}, simulated).copy(destination, torch.arange(10.0))


def test_memory_that_is_not_pinned_after_all_is_a_refusal(simulated):
    simulated.is_pinned = lambda tensor: False
    transfer = routed(simulated, "pinned_staged", chunk_elements=3)
    with pytest.warns(FallbackWarning, match="memory that is not pinned"):
        transfer.copy(simulated.device_empty(10, dtype=torch.bfloat16), torch.arange(10.0))
    assert simulated.pinned_bytes == 0


@pytest.mark.filterwarnings("ignore::transfer.FallbackWarning")
@pytest.mark.parametrize("options", [{"events": False}, {"streams": False}, {"streams": False, "events": False}])
def test_without_streams_or_events(options):
    bare = SimulatedAccelerator(**options)
    for transfer in (routed(bare, "pinned_staged", chunk_elements=3), build_transfer({}, bare)):
        destination = bare.device_empty(10, dtype=torch.bfloat16)
        transfer.copy(destination, torch.arange(10.0))
        assert destination.tolist() == list(range(10))
        transfer.close()


def test_events_without_streams_are_enough_to_stage():
    simulated = SimulatedAccelerator(streams=False)
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=3, fallback=False) as transfer:
        destination = simulated.device_empty(10, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(10.0))
        assert not copy.done
        copy.order_after(None)
        assert destination.tolist() == list(range(10))


def test_events_are_made_and_recorded_without_arguments(simulated):
    """Some accelerators' ``Event()`` or ``record()`` take none."""
    inner = simulated.Event

    class Strict:
        def __init__(self):
            self._event = inner()

        def record(self):
            self._event.record()

        def synchronize(self):
            self._event.synchronize()

        def query(self):
            return self._event.query()

    simulated.Event = Strict
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=3) as transfer:
        destination = simulated.device_empty(10, dtype=torch.bfloat16)
        transfer.copy(destination, torch.arange(10.0))
    assert destination.tolist() == list(range(10))


def test_pinned_bytes_can_be_asked_for_while_threads_submit_and_close(simulated):
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=16)
    stop, wrong = threading.Event(), []

    def work(dtype):
        try:
            while not stop.is_set():
                transfer.copy(simulated.device_empty(40, dtype=dtype), torch.ones(40))
                transfer.close()
        except Exception as error:  # noqa: BLE001 - a thread's error must reach the test
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(dtype,), daemon=True) for dtype in (torch.bfloat16, torch.float32)]
    for thread in threads:
        thread.start()
    asked = [transfer.pinned_bytes for _ in range(20_000)]
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    # Up to two buffers of 16 elements for each dtype: of 32 bytes in bf16, of 64 in fp32.
    assert set(asked) <= {32 * halves + 64 * singles for halves in range(3) for singles in range(3)}
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_another_dtypes_ring_survives_a_refusal(simulated):
    transfer = routed(simulated, "pinned_staged", chunk_elements=3)
    for dtype in (torch.bfloat16, torch.float32):
        destination = simulated.device_empty(10, dtype=dtype)
        simulated.pin_limit_bytes = 12
        with pytest.warns(FallbackWarning) if dtype is torch.float32 else contextlib.nullcontext():
            transfer.copy(destination, torch.arange(10.0))
        assert destination.tolist() == list(range(10))
        assert transfer.pinned_bytes == 12
    transfer.close()


def test_a_refusal_belongs_to_the_accelerator_that_refused():
    import accelerators

    transfer = build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}})
    try:
        for options, pinned in (({"events": False}, 0), ({}, 12)):
            simulated = SimulatedAccelerator(**options)
            accelerators.set_accelerator(simulated)
            with contextlib.nullcontext() if pinned else pytest.warns(FallbackWarning):
                transfer.copy(simulated.device_empty(10, dtype=torch.bfloat16), torch.arange(10.0))
            assert transfer.pinned_bytes == pinned
        transfer.close()
    finally:
        accelerators.set_accelerator(None)


def test_a_warning_points_at_the_callers_line():
    bare = SimulatedAccelerator(events=False)
    for transfer in (build_transfer({"strategy": "pinned_staged"}, bare),):
        with pytest.warns(FallbackWarning) as caught:
            transfer.copy(bare.device_empty(4, dtype=torch.bfloat16), torch.zeros(4))
        assert caught[0].filename == __file__


def test_threads_that_share_a_transfer_all_use_its_ring(simulated):
    recorder = Recorder(simulated)
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=50, buffers=1) as transfer:

        def work():
            for _ in range(20):
                transfer.copy(simulated.device_empty(333, dtype=torch.bfloat16), torch.ones(333))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(recorder.copies) == 4 * 20 * 7
    assert all(pinned for _, _, _, pinned in recorder.copies)
    assert len(recorder.pinned) == 1


@pytest.mark.parametrize("method", ["Event.synchronize", "unpin_memory"])
@pytest.mark.parametrize("again", ["submit", "close"])
def test_a_close_that_is_entered_again_leaks_nothing(simulated, method, again):
    """By a signal handler or a finalizer, in the middle of it."""
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=4)
    first, second = (simulated.device_empty(8, dtype=torch.float32) for _ in range(2))
    entered = []

    def enter():
        if not entered:
            entered.append(1)
            if again == "close":
                transfer.close()
                return
            with pytest.raises(TransferBusyError):
                transfer.copy(second, torch.ones(8))

    if method == "unpin_memory":
        unpin = simulated.unpin_memory
        simulated.unpin_memory = lambda memory: (unpin(memory), enter())[0]
    else:
        make = simulated.Event

        def make_interrupted():
            event = make()
            synchronize = event.synchronize
            event.synchronize = lambda: (enter(), synchronize())
            return event

        simulated.Event = make_interrupted
    transfer.submit(first, torch.arange(8.0))
    transfer.close()
    assert entered
    assert first.tolist() == list(range(8))
    transfer.copy(second, torch.ones(8))
    assert second.tolist() == [1.0] * 8
    transfer.close()
    assert transfer.pinned_bytes == simulated.pinned_bytes == 0


def test_a_close_inside_a_copy_that_another_strategy_does_closes_the_other_rings(simulated):
    transfer = routed(simulated, "pinned_staged", chunk_elements=4)
    transfer.copy(simulated.device_empty(8, dtype=torch.bfloat16), torch.arange(8.0))
    simulated.pin_limit_bytes = simulated.pinned_bytes
    original = simulated.enqueue_copy
    simulated.enqueue_copy = lambda *tensors: (transfer.close(), original(*tensors))
    with pytest.warns(FallbackWarning):
        transfer.copy(simulated.device_empty(8, dtype=torch.float32), torch.arange(8.0))
    assert transfer.pinned_bytes == simulated.pinned_bytes == 0


def test_a_close_inside_a_submit_that_fails_is_told_of(simulated):
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=4)
    destination = simulated.device_empty(8, dtype=torch.float32)
    original = simulated.enqueue_copy
    simulated.enqueue_copy = lambda *tensors: (transfer.close(), original(*tensors))
    with (
        failing(simulated, "unpin_memory", RuntimeError("lost device")),
        pytest.raises(RuntimeError, match="lost device"),
    ):
        transfer.copy(destination, torch.arange(8.0))
    simulated.enqueue_copy = original
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_two_strategies_in_two_threads(simulated):
    wrong = []

    def work(value):
        with (
            PinnedStagedTransfer(accelerator=simulated, chunk_elements=50) as transfer,
            simulated.stream(simulated.Stream()),
        ):
            for numel in (1, 1000, 333) * 20:
                destination = simulated.device_empty(numel, dtype=torch.bfloat16)
                transfer.copy(destination, torch.full((numel,), value))
                if not (destination == value).all():
                    wrong.append(value)

    run_threads(work, (1.0, 2.0))
    assert not wrong
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_streams_in_turn_share_the_ring_safely(seed):
    """The guard of a buffer belongs to the buffer, whichever stream its last copy ran on."""
    simulated = SimulatedAccelerator(seed)
    streams = [simulated.Stream() for _ in range(3)]
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=4, buffers=3)
    copies = []
    for value in range(12):
        destination = simulated.device_empty(10, dtype=torch.bfloat16)
        with simulated.stream(streams[value % 3]):
            copies.append((transfer.submit(destination, torch.arange(10.0) + 10 * value), destination, value))
    for copy, destination, value in copies[::-1]:
        copy.wait()
        assert destination.tolist() == [10 * value + index for index in range(10)]
    transfer.close()


def test_a_source_with_a_short_last_chunk_brings_no_stale_bytes(simulated):
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=500)
    transfer.copy(simulated.device_empty(5000, dtype=torch.bfloat16), torch.full((5000,), 9.0))
    parent = simulated.device_empty(1010, dtype=torch.bfloat16)
    parent.fill_(-1)
    transfer.copy(parent[:1003], torch.zeros(1003))
    assert parent[:1003].tolist() == [0.0] * 1003
    assert parent[1003:].tolist() == [-1.0] * 7


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "eight", 2**62, None, "256MiB"])
@pytest.mark.parametrize("field", ["chunk_elements", "buffers"])
def test_bad_sizes_are_refused_before_anything_is_pinned(simulated, field, value):
    recorder = Recorder(simulated)
    with pytest.raises(ValueError, match=field) as caught:
        PinnedStagedTransfer(accelerator=simulated, **{field: value})
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(ConfigError, match=rf"pinned_staged\.{field}"):
        build_transfer({"pinned_staged": {field: value}}, simulated)
    assert not recorder.pinned


@pytest.mark.slow
def test_bad_sizes_do_not_abort_under_the_native_pinning_backend():
    program = "from transfer import PinnedStagedTransfer\nPinnedStagedTransfer(chunk_elements=2**36)"
    done = run_python("-c", program, environment={"DS_PIN_MEMORY_BACKEND": "native"}, forked=True)
    assert done.returncode == 1
    assert "ConfigError: chunk_elements: found 68719476736 (int): expected from 1 to 1073741824 elements" in done.stderr


class Rounding(SimulatedAccelerator):
    """Rounds pinned memory up to powers of two, as torch's caching host allocator does."""

    @property
    def capabilities(self):
        import dataclasses

        return dataclasses.replace(super().capabilities, pin_rounds_to_power_of_two=True)


@pytest.mark.parametrize(
    ("chunk", "wanted", "taken"), [(50_000_000, 100_000_000, 134_217_728), (67_108_865, 134_217_730, 268_435_456)]
)
def test_memory_lost_to_rounding_is_warned_of_with_both_numbers(chunk, wanted, taken):
    rounding = Rounding()
    transfer = PinnedStagedTransfer(accelerator=rounding, chunk_elements=chunk)
    remedy = f"{taken // 2} or {taken // 4}"  # elements of two bytes
    with pytest.warns(PinnedMemoryWarning, match=f"buffer of {wanted} bytes really takes {taken},.*{remedy}"):
        transfer.copy(rounding.device_empty(10, dtype=torch.bfloat16), torch.zeros(10))
    transfer.close()
    quiet = PinnedStagedTransfer(accelerator=rounding, chunk_elements=2**22)
    quiet.copy(rounding.device_empty(10, dtype=torch.bfloat16), torch.zeros(10))
    quiet.close()


def test_a_failed_wait_at_close_keeps_the_memory_pinned_until_it_works(simulated):
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=3)
    with (
        failing(simulated, "Event.synchronize", RuntimeError("no answer"), after=2, times=1),
        failing(simulated, "synchronize", RuntimeError("lost device")),
    ):
        transfer.submit(simulated.device_empty(10, dtype=torch.bfloat16), torch.arange(10.0))
        with pytest.raises(RuntimeError, match="lost device"):
            transfer.close()
        assert simulated.pinned_bytes == 12
        transfer.close()
    assert simulated.pinned_bytes == 0


def test_an_interrupted_drain_is_made_up_for(simulated):
    """The device cannot even be waited for after the failure; the next copy must wait before it writes."""
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=3)
    first = simulated.device_empty(10, dtype=torch.bfloat16)
    with (
        failing(simulated, "synchronize", RuntimeError("not now")),
        failing(simulated, "Event.record", RuntimeError("broken"), after=1),
        pytest.raises(RuntimeError, match="broken"),
    ):
        transfer.submit(first, torch.arange(10.0))
    second = simulated.device_empty(10, dtype=torch.bfloat16)
    transfer.copy(second, torch.arange(10.0) + 100)
    simulated.synchronize()
    assert first[:6].tolist() == [0, 1, 2, 3, 4, 5], "a buffer was written again while its copy was still to come"
    assert second.tolist() == [100 + index for index in range(10)]
    transfer.close()


@pytest.mark.parametrize("chunk", [1, 10])
def test_a_negative_view_keeps_its_sign_in_chunks_of_one_element(simulated, chunk):
    source = torch.complex(torch.zeros(21), torch.arange(1.0, 22.0)).conj().imag
    assert source.is_neg()
    destination = simulated.device_empty(21, dtype=torch.float16)
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=chunk) as transfer:
        transfer.copy(destination, source)
    assert destination.tolist() == [-float(each) for each in range(1, 22)]
