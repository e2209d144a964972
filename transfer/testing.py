"""A conformance suite for strategies: the contract of ``HostToDeviceTransfer`` as tests. Needs pytest.

A strategy's test file::

    from transfer.testing import TransferConformance

    class TestMine(TransferConformance):
        accelerator_name = "cuda"

        def make_transfer(self, accelerator):
            return MyTransfer(accelerator=accelerator)

The suite prepares destinations and reads results without the strategy under test.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.testing import accelerator_or_skip, bits, failing, fetch, skip_without

from .errors import InvalidTensorError, NotATensorError, TransferError, UnsupportedDtypeError
from .interface import HostToDeviceTransfer

# fp32 bits, and the bits that round-to-nearest-even gives in bf16 and fp16. From IEEE 754: ties go
# to the even neighbour, what rounds past the largest finite value is inf, subnormals are kept.
ROUNDING = (
    (0x3F808000, 0x3F80, 0x3C04),
    (0x3F818000, 0x3F82, 0x3C0C),
    (0x3F828000, 0x3F82, 0x3C14),
    (0x3F808001, 0x3F81, 0x3C04),
    (0x3F807FFF, 0x3F80, 0x3C04),
    (0x3E89CCD5, 0x3E8A, 0x344E),
    (0x7F7F7FFF, 0x7F7F, 0x7C00),
    (0x7F7F8000, 0x7F80, 0x7C00),
    (0x7F7FFFFF, 0x7F80, 0x7C00),
    (0xFF7FFFFF, 0xFF80, 0xFC00),
    (0x477FE000, 0x4780, 0x7BFF),
    (0x477FEFFF, 0x4780, 0x7BFF),
    (0x477FF000, 0x4780, 0x7C00),
    (0x47BC0000, 0x47BC, 0x7C00),
    (0x00008000, 0x0000, 0x0000),
    (0x00008001, 0x0001, 0x0000),
    (0x00018000, 0x0002, 0x0000),
    (0x007FFFFF, 0x0080, 0x0000),
    (0x007F8000, 0x0080, 0x0000),
    (0x00000001, 0x0000, 0x0000),
    (0x80000001, 0x8000, 0x8000),
    (0x80000000, 0x8000, 0x8000),
    (0x33000000, 0x3300, 0x0000),
    (0x33000001, 0x3300, 0x0001),
    (0x387FE000, 0x3880, 0x0400),
    (0x387FF000, 0x3880, 0x0400),
    (0x36D70000, 0x36D7, 0x006C),
    (0x7F800000, 0x7F80, 0x7C00),
    (0xFF800000, 0xFF80, 0xFC00),
)
_GUARD = -77.0


def from_bits(patterns: list[int]) -> Tensor:
    """fp32 values with exactly these bits."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random_bits(numel: int, seed: int) -> Tensor:
    """fp32 values with random bits: every exponent, subnormals, infinities; NaNs are made finite.

    NaN payloads are free by contract, so they are tested on their own.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = values.view(torch.float32)
    return torch.where(values.isnan(), torch.full_like(values, 0.1), values)


@pytest.mark.filterwarnings("ignore::transfer.FallbackWarning")
class TransferConformance:
    """The contract of a strategy. Subclass it, give the hooks, and pytest runs it.

    Hooks: ``accelerator_name`` or ``make_accelerator``, and ``make_transfer``. Make the transfer with
    chunks of a few hundred elements, so that its buffers refill often in the tests here.
    """

    accelerator_name: str = ""

    def make_accelerator(self, config: pytest.Config) -> Accelerator:
        return accelerator_or_skip(self.accelerator_name, config)

    def make_transfer(self, accelerator: Accelerator) -> HostToDeviceTransfer:
        raise AssertionError("a subclass makes the strategy under test here")

    @pytest.fixture
    def accelerator(self, pytestconfig: pytest.Config) -> Accelerator:
        return self.make_accelerator(pytestconfig)

    @pytest.fixture
    def transfer(self, accelerator: Accelerator) -> Iterator[HostToDeviceTransfer]:
        transfer = self.make_transfer(accelerator)
        yield transfer
        transfer.close()
        assert transfer.pinned_bytes == 0

    # 1. The same bits.

    @pytest.mark.parametrize(("dtype", "column"), [(torch.bfloat16, 1), (torch.float16, 2)])
    @pytest.mark.parametrize("copies", [1, 67])
    def test_rounds_to_nearest_even(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, dtype: torch.dtype, column: int, copies: int
    ) -> None:
        source = from_bits([row[0] for row in ROUNDING]).repeat_interleave(copies)
        destination = accelerator.device_empty(source.numel(), dtype=dtype)
        transfer.copy(destination, source)
        got = fetch(accelerator, destination).view(torch.int16).to(torch.int64) & 0xFFFF
        assert got.tolist() == [row[column] for row in ROUNDING for _ in range(copies)]

    def test_a_nan_stays_a_nan(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        # The last of these is a payload that plain truncation to bf16 would turn into inf.
        source = from_bits([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001])
        for dtype in (torch.bfloat16, torch.float16):
            destination = accelerator.device_empty(4, dtype=dtype)
            transfer.copy(destination, source)
            assert fetch(accelerator, destination).float().isnan().tolist() == [True] * 4

    @pytest.mark.parametrize("numel", [1, 2, 999, 1000, 1001, 20_007])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_equals_a_direct_copy(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, dtype: torch.dtype, numel: int
    ) -> None:
        source = random_bits(numel, seed=numel)
        destination = accelerator.device_empty(numel, dtype=dtype)
        transfer.copy(destination, source)
        assert torch.equal(bits(fetch(accelerator, destination)), bits(source.to(dtype)))

    def test_more_than_a_mebibyte(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = random_bits(700_001, seed=2)
        destination = accelerator.device_empty(700_001, dtype=torch.bfloat16)
        transfer.copy(destination, source)
        assert torch.equal(bits(fetch(accelerator, destination)), bits(source.to(torch.bfloat16)))

    @pytest.mark.parametrize("source_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_every_pair_of_dtypes(
        self,
        accelerator: Accelerator,
        transfer: HostToDeviceTransfer,
        source_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        source = random_bits(1003, seed=1).to(source_dtype)
        destination = accelerator.device_empty(1003, dtype=dtype)
        transfer.copy(destination, source)
        assert torch.equal(bits(fetch(accelerator, destination)), bits(source.to(dtype)))

    def test_two_dtypes_in_turn(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16)):
            source = random_bits(2000, seed)
            destination = accelerator.device_empty(2000, dtype=dtype)
            transfer.copy(destination, source)
            assert torch.equal(bits(fetch(accelerator, destination)), bits(source.to(dtype)))

    def test_no_elements(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        for shape in ((0,), (0, 8), (3, 0, 2)):
            transfer.copy(accelerator.device_empty(*shape, dtype=torch.bfloat16), torch.empty(shape))
        transfer.copy(accelerator.device_empty(8, dtype=torch.bfloat16)[5:5], torch.ones(8)[3:3])
        assert transfer.pinned_bytes == 0
        destination = accelerator.device_empty(3, dtype=torch.bfloat16)
        transfer.copy(destination, torch.arange(3.0))
        assert fetch(accelerator, destination).tolist() == [0, 1, 2]

    def test_a_scalar(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(dtype=torch.float16)
        transfer.copy(destination, torch.tensor(2.5))
        assert fetch(accelerator, destination).item() == 2.5

    # 2. Nothing outside the destination.

    def test_strided_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        parent = accelerator.device_empty(2000, dtype=torch.float32)
        parent.fill_(_GUARD)
        transfer.copy(parent[::2], torch.arange(1000.0))
        expected = torch.full((2000,), _GUARD)
        expected[::2] = torch.arange(1000.0)
        assert torch.equal(fetch(accelerator, parent), expected)

    def test_transposed_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        storage = accelerator.device_empty(3, 4, dtype=torch.float32)
        transfer.copy(storage.t(), torch.arange(12.0).view(4, 3))
        assert fetch(accelerator, storage).flatten().tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]

    def test_large_transposed_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        storage = accelerator.device_empty(40, 700, dtype=torch.bfloat16)
        source = random_bits(28_000, seed=3).view(700, 40)
        transfer.copy(storage.t(), source)
        assert torch.equal(bits(fetch(accelerator, storage)), bits(source.t().contiguous().to(torch.bfloat16)))

    def test_strided_source(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(4000.0).view(50, 80)
        for view in (source[::2], source.t(), source[:, 3:40], source[5, :1].expand(600, 1)):
            destination = accelerator.device_empty(*view.shape, dtype=torch.float32)
            transfer.copy(destination, view)
            assert torch.equal(fetch(accelerator, destination), view)

    def test_both_sides_strided(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(6000.0).view(60, 100).t()[:, ::3]
        parent = accelerator.device_empty(20, 200, dtype=torch.float32)
        parent.fill_(_GUARD)
        transfer.copy(parent.t()[::2], source)
        expected = torch.full((20, 200), _GUARD)
        expected.t()[::2] = source
        assert torch.equal(fetch(accelerator, parent), expected)

    def test_neighbours_are_untouched(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        parent = accelerator.device_empty(3000, dtype=torch.bfloat16)
        parent.fill_(_GUARD)
        transfer.copy(accelerator.device_empty(5000, dtype=torch.bfloat16), torch.full((5000,), 9.0))
        transfer.copy(parent[1000:2003], torch.arange(1003.0))
        got = fetch(accelerator, parent).float()
        assert (got[:1000] == _GUARD).all()
        assert torch.equal(got[1000:2003], torch.arange(1003.0).bfloat16().float())
        assert (got[2003:] == _GUARD).all()

    # What is refused, before anything is written.

    def test_refusals_write_nothing(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(6, dtype=torch.float32)
        destination.fill_(_GUARD)
        shrunk = torch.zeros(6)
        shrunk.untyped_storage().resize_(8)
        refused = [
            (torch.zeros(5), InvalidTensorError),
            (torch.zeros(1), InvalidTensorError),
            (torch.zeros(2, 3), InvalidTensorError),
            (torch.zeros(6, device="meta"), InvalidTensorError),
            (torch.zeros(6).to_sparse(), InvalidTensorError),
            (shrunk, InvalidTensorError),
            (torch.zeros(6, dtype=torch.int32), UnsupportedDtypeError),
            (torch.zeros(6, dtype=torch.complex64), UnsupportedDtypeError),
            (torch.zeros(6, dtype=torch.bool), UnsupportedDtypeError),
            (None, NotATensorError),
            ([0.0] * 6, NotATensorError),
        ]
        for source, error in refused:
            with pytest.raises(error) as caught:
                transfer.submit(destination, source)  # type: ignore[arg-type]  # what is wrong is the point
            assert "destination: torch.float32 (6,)" in str(caught.value)
            assert "source: " in str(caught.value)
            assert isinstance(caught.value, TransferError)
        assert (fetch(accelerator, destination) == _GUARD).all()
        transfer.copy(destination, torch.arange(6.0))
        assert fetch(accelerator, destination).tolist() == [0, 1, 2, 3, 4, 5]

    def test_a_destination_that_overlaps_itself_is_refused(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        memory = accelerator.device_empty(8, dtype=torch.float32)
        memory.fill_(_GUARD)
        for destination in (memory[:1].expand(4), memory.as_strided((3, 3), (2, 1)), memory.as_strided((2, 2), (1, 1))):
            with pytest.raises(InvalidTensorError, match="share memory"):
                transfer.submit(destination, torch.zeros(destination.shape))
        assert (fetch(accelerator, memory) == _GUARD).all()
        # These strides look alike and do not overlap: offsets 0, 2, 4, 3, 5, 7.
        transfer.copy(memory.as_strided((2, 3), (3, 2)), torch.arange(6.0).view(2, 3))
        assert fetch(accelerator, memory).tolist() == [0, _GUARD, 1, 3, 2, 4, _GUARD, 5]

    def test_partial_overlap_is_refused_and_the_same_memory_is_not(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        memory = accelerator.device_empty(12, dtype=torch.float32)
        memory.copy_(torch.arange(12.0))
        transfer.copy(memory, memory)
        with pytest.raises(InvalidTensorError, match="overlap"):
            transfer.submit(memory[1:], memory[:-1])
        assert fetch(accelerator, memory).tolist() == list(range(12))
        transfer.copy(memory[::2], memory[1::2])
        assert fetch(accelerator, memory).tolist() == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11]

    # Autograd and inference mode.

    def test_requires_grad_is_left_alone(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(800.0, requires_grad=True)
        plain = accelerator.device_empty(800, dtype=torch.bfloat16)
        leaf = accelerator.device_empty(800, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3):
            transfer.copy(plain, source)
            transfer.copy(leaf, source)
        assert not plain.requires_grad
        assert plain.grad_fn is None
        assert leaf.requires_grad
        assert leaf.is_leaf
        for destination in (plain, leaf):
            assert torch.equal(fetch(accelerator, destination), torch.arange(800.0).bfloat16())

    def test_first_use_in_inference_mode(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
        with torch.inference_mode():
            transfer.copy(destination, torch.ones(1000))
        transfer.copy(destination, torch.full((1000,), 2.0))
        assert (fetch(accelerator, destination) == 2).all()

    def test_an_inference_destination_outside_inference_mode(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        with torch.inference_mode():
            destination = accelerator.device_empty(4, dtype=torch.float32) + 0
        if not destination.is_inference():
            pytest.skip("This accelerator's memory is never an inference tensor.")
        with pytest.raises(RuntimeError, match="inference"):
            transfer.submit(destination, torch.zeros(4))

    def test_rebound_storage_is_followed(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        master = torch.nn.Parameter(torch.full((700,), 1.0))
        destination = accelerator.device_empty(700, dtype=torch.bfloat16)
        pinned = accelerator.pin_empty(700, dtype=torch.float32)
        pinned.fill_(2)
        for value, storage in ((1, master.data), (2, pinned), (3, torch.full((700,), 3.0))):
            master.data = storage
            transfer.copy(destination, master)
            assert (fetch(accelerator, destination) == value).all()
        accelerator.synchronize()
        accelerator.unpin_memory(pinned)

    # 3. The source.

    def test_the_source_is_free_after_release_source(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        source, destination = torch.arange(5000.0), accelerator.device_empty(5000, dtype=torch.float32)
        copy = transfer.submit(destination, source)
        copy.release_source()
        source.fill_(_GUARD)
        copy.wait()
        assert torch.equal(destination.cpu(), torch.arange(5000.0))

    def test_sources_dropped_at_once(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        copies = []
        for seed in range(3):
            destination = accelerator.device_empty(1, dtype=torch.float32)
            values = torch.randn(1, generator=torch.Generator().manual_seed(seed))
            copies.append((transfer.submit(destination, values), destination))
        del values
        gc.collect()
        for copy, _ in copies:
            copy.wait()
        got = [round(destination.cpu().item(), 4) for _, destination in copies]
        assert got == [1.5410, 0.6614, 0.3923]

    def test_a_source_on_the_device(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = accelerator.device_empty(1000, dtype=torch.float32)
        source.copy_(torch.arange(1000.0))
        destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
        transfer.copy(destination, source)
        assert torch.equal(destination.cpu(), torch.arange(1000.0).bfloat16())

    def test_a_destination_on_the_host(self, transfer: HostToDeviceTransfer) -> None:
        destination = torch.zeros(1000, dtype=torch.bfloat16)
        transfer.copy(destination, torch.arange(1000.0))
        assert torch.equal(destination, torch.arange(1000.0).bfloat16())

    # 4. Bounded, and given back.

    def test_pinned_bytes_do_not_grow(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        transfer.copy(accelerator.device_empty(10, dtype=torch.bfloat16), torch.zeros(10))
        held = transfer.pinned_bytes
        for numel in (1, 999, 20_000):
            transfer.copy(accelerator.device_empty(numel, dtype=torch.bfloat16), torch.zeros(numel))
            assert transfer.pinned_bytes == held

    def test_close_gives_everything_back(self, accelerator: Accelerator) -> None:
        before = getattr(accelerator, "pinned_bytes", 0)
        transfer = self.make_transfer(accelerator)
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        transfer.close()
        assert transfer.pinned_bytes == 0
        assert getattr(accelerator, "pinned_bytes", 0) == before
        copy.wait()
        assert torch.equal(destination.cpu(), torch.arange(3000.0).bfloat16())
        transfer.close()

    def test_use_after_close_starts_afresh(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        for value in (1.0, 2.0):
            destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
            transfer.copy(destination, torch.full((1000,), value))
            assert (fetch(accelerator, destination) == value).all()
            transfer.close()

    def test_dropping_a_transfer_in_flight(self, accelerator: Accelerator) -> None:
        before = getattr(accelerator, "pinned_bytes", 0)
        transfer = self.make_transfer(accelerator)
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        del transfer
        gc.collect()
        assert getattr(accelerator, "pinned_bytes", 0) == before
        copy.wait()
        assert torch.equal(destination.cpu(), torch.arange(3000.0).bfloat16())

    # 5. Failures.

    @pytest.mark.parametrize("after", [0, 1, 4])
    @pytest.mark.parametrize(
        "method", ["enqueue_copy", "Event", "Event.record", "Event.synchronize", "current_stream", "stream", "pin_empty"]
    )
    @pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt(), OSError("injected")])
    def test_a_failure_is_clean(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, method: str, error: BaseException, after: int
    ) -> None:
        if method.startswith("Event"):
            skip_without(accelerator, "events")
        destination = accelerator.device_empty(4003, dtype=torch.bfloat16)
        destination.fill_(_GUARD)
        source = torch.arange(4003.0)
        with failing(accelerator, method, error, after=after):
            try:
                copy = transfer.submit(destination, source)
                copy.wait()
            except type(error) as caught:
                assert caught is error or isinstance(caught, TransferError)
        if hasattr(accelerator, "pinned_bytes"):
            assert accelerator.pinned_bytes == transfer.pinned_bytes, "a buffer was lost"
        got = fetch(accelerator, destination)
        new = source.bfloat16()
        assert ((got == new) | (got == _GUARD)).all(), "an element is neither its old nor its new value"
        for value in (1.0, 2.0, 3.0):
            transfer.copy(destination, source + value)
            assert torch.equal(destination.cpu(), (source + value).bfloat16())

    # 6. Streams.

    def test_runs_after_work_queued_before_it(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        old = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        old.fill_(_GUARD)
        destination = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        for _ in range(20):
            accelerator.enqueue_copy(destination, old)
        transfer.copy(destination, torch.ones(200_000))
        assert (fetch(accelerator, destination) == 1).all()

    def test_a_side_stream_is_used_when_current(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        skip_without(accelerator, "streams")
        old = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        old.fill_(_GUARD)
        destination = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        accelerator.synchronize()
        assert accelerator.Stream is not None
        with accelerator.stream(accelerator.Stream()):
            for _ in range(20):
                accelerator.enqueue_copy(destination, old)
            transfer.copy(destination, torch.ones(200_000))
        assert (fetch(accelerator, destination) == 1).all()

    def test_order_after_makes_another_stream_see_the_values(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        skip_without(accelerator, "streams")
        destination, seen = (accelerator.device_empty(200_000, dtype=torch.bfloat16) for _ in range(2))
        accelerator.synchronize()
        assert accelerator.Stream is not None
        consumer = accelerator.Stream()
        copy = transfer.submit(destination, torch.full((200_000,), 4.0))
        copy.order_after(consumer)
        with accelerator.stream(consumer):
            accelerator.enqueue_copy(seen, destination)
        consumer.synchronize()
        assert (seen.cpu() == 4).all()
        copy.wait()

    def test_wait_is_idempotent_and_done_becomes_true(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        copy.wait()
        copy.wait()
        assert copy.done
        assert torch.equal(destination.cpu(), torch.arange(3000.0).bfloat16())
        copy.order_after(accelerator.current_stream())
        copy.release_source()

    def test_done_becomes_true_by_asking(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        for _ in range(1_000_000):
            if copy.done:
                break
        assert copy.done
        assert torch.equal(destination.cpu(), torch.arange(3000.0).bfloat16())

    def test_two_copies_in_flight(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destinations = [accelerator.device_empty(2500, dtype=torch.bfloat16) for _ in range(4)]
        copies = [transfer.submit(destination, torch.full((2500,), float(i))) for i, destination in enumerate(destinations)]
        for copy in reversed(copies):
            copy.wait()
        for i, destination in enumerate(destinations):
            assert (destination.cpu() == i).all()

    # Threads.

    def test_threads_share_one_transfer(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        wrong: list[str] = []

        def work(value: float) -> None:
            try:
                for numel in (1, 1000, 10_007) * 17:
                    destination = accelerator.device_empty(numel, dtype=torch.bfloat16)
                    transfer.copy(destination, torch.full((numel,), value))
                    if not (destination.cpu() == value).all():
                        wrong.append(f"thread {value} saw other values")
            except Exception as error:  # noqa: BLE001 - a thread's error must reach the test
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(float(i + 1),), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        assert not wrong
