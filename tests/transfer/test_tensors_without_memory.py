"""Tensors that are no memory of their own are refused everywhere, by one sentence; those that are, are copied."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accelerators.simulated import SimulatedAccelerator
from transfer import InvalidTensorError, TransferPolicy, build_transfer, nvme
from transfer.strategies.nvme_swapped import NvmeSwappedTransfer
from transfer.strategies.pageable import PageableTransfer
from transfer.strategies.pinned_direct import PinnedDirectTransfer
from transfer.strategies.pinned_staged import PinnedStagedTransfer

BEFORE, VALUES = [-1.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("mesh") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Wraps(torch.Tensor):
    """As a quantised or a sharded tensor: the values are in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        out = function(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out


class Scaled(torch.Tensor):
    """Its memory holds other values than the tensor does."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_subclass(cls, values / 2)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        return super().__torch_dispatch__(function, types, args, kwargs or {})


def fake(tensor):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return mode.from_tensor(tensor)


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


WITHOUT_MEMORY = {
    "DTensor": None,
    "wrapper": Wraps,
    "scaled": Scaled,
    "fake": fake,
    "functional": torch._to_functional_tensor,
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "freed": freed,
    "meta": lambda tensor: tensor.to("meta"),
}


@pytest.fixture(params=WITHOUT_MEMORY)
def without_memory(request):
    """Makes such a tensor of a plain one, which stays as it is."""
    if request.param == "DTensor":
        mesh = request.getfixturevalue("mesh")
        return lambda tensor: DTensor.from_local(tensor, mesh, [Shard(0)])
    make = WITHOUT_MEMORY[request.param]
    return lambda tensor: make(tensor.clone() if make is freed else tensor)


STRATEGIES = {
    "routed": lambda accelerator: build_transfer({}, accelerator),
    "pageable": lambda accelerator: PageableTransfer(accelerator=accelerator),
    "pinned_staged": lambda accelerator: PinnedStagedTransfer(accelerator=accelerator, chunk_elements=4),
    "pinned_direct": lambda accelerator: PinnedDirectTransfer(accelerator=accelerator),
    "nvme_swapped": lambda accelerator: NvmeSwappedTransfer(accelerator=accelerator),
}


@pytest.fixture(params=STRATEGIES)
def transfer(request, simulated):
    with STRATEGIES[request.param](simulated) as made:
        yield made
        assert made.pinned_bytes == made.page_locked_bytes == 0
    assert simulated.pinned_bytes == 0


def device(simulated, dtype=torch.float32):
    return simulated.device_empty(6, dtype=dtype).fill_(-1)


REFUSED = r"has no memory of its own|without memory|needs \d+ bytes of storage but has 0"


@pytest.mark.parametrize("side", ["source", "destination", "both"])
def test_every_copy_of_them_is_refused_and_writes_nothing(simulated, transfer, without_memory, side):
    for dtype in (torch.float32, torch.bfloat16):
        inside, values = device(simulated, dtype), torch.arange(6.0)
        destination = inside if side == "source" else without_memory(inside)
        source = values if side == "destination" else without_memory(values)
        for call in (transfer.submit, transfer.copy):
            with pytest.raises(InvalidTensorError, match=REFUSED) as refused:
                call(destination, source)
            assert "overlap" not in str(refused.value)
            assert len(str(refused.value).splitlines()) == 1
        simulated.synchronize()
        assert inside.tolist() == BEFORE
        assert transfer.why_not(destination, source) is not None
        assert not transfer.is_host_to_device(destination, source)


def test_preparing_one_is_refused_and_ends_nothing(simulated, transfer, without_memory):
    for _ in range(3):  # two refusals by the system end page-locking
        with pytest.raises(InvalidTensorError, match=REFUSED):
            transfer.prepare(without_memory(torch.arange(6.0)))
    assert simulated.pinned_bytes == 0
    plain = torch.zeros(2**18)
    transfer.prepare(plain)
    locks = isinstance(transfer, PinnedDirectTransfer) or hasattr(transfer, "policy")
    assert transfer.page_locked_bytes == (plain.nbytes if locks else 0)
    transfer.unprepare(plain)


def test_there_is_nothing_to_undo_for_one(simulated, transfer, mesh):
    for source in (DTensor.from_local(torch.arange(6.0), mesh, [Shard(0)]), Wraps(torch.arange(6.0))):
        with pytest.raises(InvalidTensorError, match="no memory of its own"):
            transfer.unprepare(source)


def test_what_was_prepared_can_be_undone_after_its_memory_was_freed(simulated, transfer):
    source = torch.zeros(2**18)
    transfer.prepare(source)
    transfer.close()
    freed(source)
    transfer.unprepare(source)


def test_no_strategy_is_selected_for_one(simulated, without_memory):
    policy = TransferPolicy({}, simulated)
    for pair in (
        (device(simulated), without_memory(torch.zeros(6))),
        (without_memory(device(simulated)), torch.zeros(6)),
    ):
        with pytest.raises(InvalidTensorError, match=REFUSED):
            policy.select(*pair)


def test_one_cannot_be_swapped_out_or_read_into(simulated, transfer, without_memory, tmp_path):
    with pytest.raises(InvalidTensorError, match=REFUSED):
        nvme.swap_out(without_memory(torch.arange(6.0)), tmp_path)
    inside = device(simulated)
    swapped = nvme.swap_out(torch.arange(6.0), tmp_path)
    with pytest.raises(InvalidTensorError, match=REFUSED):
        transfer.copy(without_memory(inside), swapped)
    assert inside.tolist() == BEFORE


def test_a_dtensor_is_told_what_to_copy_instead(simulated, transfer, mesh):
    source = DTensor.from_local(torch.arange(6.0), mesh, [Shard(0)])
    destination = device(simulated, torch.bfloat16)
    for call in (functools.partial(transfer.copy, destination), transfer.prepare, transfer.unprepare):
        with pytest.raises(InvalidTensorError, match=r"a DTensor, .*: take its local shard, `to_local\(\)` instead"):
            call(source)
    if not isinstance(transfer, NvmeSwappedTransfer | PinnedDirectTransfer):
        transfer.copy(destination, source.to_local())
        assert destination.tolist() == VALUES
    transfer.close()


def test_tensors_inside_vmap_and_grad_are_refused(simulated):
    destination, transfer = device(simulated), build_transfer({}, simulated)
    seen = []

    def inside(tensor):
        for call in (functools.partial(transfer.copy, destination), transfer.prepare):
            with pytest.raises(InvalidTensorError, match="no memory of its own"):
                call(tensor)
        seen.append(transfer.is_host_to_device(destination, tensor))
        return tensor.sum()

    torch.vmap(inside)(torch.zeros(2, 6))
    torch.func.grad(inside)(torch.zeros(6))
    assert seen == [False, False]
    assert destination.tolist() == BEFORE


class Named(torch.Tensor):
    """A subclass that is its memory."""


class Watched(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(
    "make",
    [torch.nn.Parameter, torch.nn.Buffer, lambda t: t.as_subclass(Named), lambda t: t.as_subclass(Watched)],
    ids=["Parameter", "Buffer", "subclass", "watched"],
)
def test_subclasses_that_are_their_memory_are_copied(simulated, transfer, make, tmp_path):
    source = make(torch.arange(6.0))
    transfer.prepare(source)
    if isinstance(transfer, NvmeSwappedTransfer):
        source = nvme.swap_out(source, tmp_path)
    targets = [device(simulated, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for target in (*targets, *map(make, map(torch.clone, targets))):
        simulated.adopt(target)
        assert transfer.is_host_to_device(target, source)
        transfer.copy(target, source)
        assert target.tolist() == VALUES
    transfer.close()


def test_a_copy_of_no_elements_needs_no_memory(simulated, transfer):
    transfer.copy(simulated.device_empty(0, dtype=torch.float32), torch.empty(0))
    transfer.prepare(torch.empty(0))
    transfer.unprepare(torch.empty(0))


def test_the_simulated_accelerator_takes_none_for_device_memory(without_memory):
    simulated = SimulatedAccelerator()
    with pytest.raises(ValueError, match="memory"):
        simulated.adopt(without_memory(torch.zeros(6)))
    with pytest.raises(ValueError, match="memory"):
        simulated.enqueue_copy(device(simulated), without_memory(torch.zeros(6)))
    assert not simulated.is_pinned(without_memory(torch.zeros(6)))
