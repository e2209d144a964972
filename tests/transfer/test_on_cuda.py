"""What only a real GPU can show: memory bounds, several devices, sizes past 2^31."""

import pytest
import torch

from accelerators.testing import accelerator_or_skip
from tests.running import run_program, run_threads
from transfer import (
    PageableTransfer,
    PinnedStagedTransfer,
    VerificationError,
    build_transfer,
    register_strategy,
    unregister_strategy,
)
from transfer.errors import GraphCaptureError


@pytest.fixture
def cuda(pytestconfig):
    return accelerator_or_skip("cuda", pytestconfig)


@pytest.fixture
def second_device(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("This machine has one GPU.")
    return torch.device("cuda", 1)


def test_no_device_memory_is_taken_beside_the_destination(cuda):
    source = torch.randn(2**26)
    destination = cuda.device_empty(2**26, dtype=torch.bfloat16)
    expected = source.bfloat16()
    for transfer in (PageableTransfer(accelerator=cuda), build_transfer({}, cuda)):
        destination.fill_(-1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        transfer.copy(destination, source)
        assert torch.cuda.max_memory_allocated() == before
        assert torch.equal(destination.cpu(), expected)
        transfer.close()


def test_more_than_two_to_the_31_elements(cuda):
    numel = 2**31 + 7
    destination = cuda.device_empty(numel, dtype=torch.bfloat16)
    destination.fill_(-1)
    with PinnedStagedTransfer(accelerator=cuda, fallback=False) as transfer:
        transfer.copy(destination, torch.full((1,), 1.5).expand(numel))
    assert (destination == 1.5).all()
    assert destination[-7:].tolist() == [1.5] * 7


def test_the_destinations_device_counts_not_the_threads(cuda, second_device):
    source = torch.arange(10_007.0)
    with PinnedStagedTransfer(accelerator=cuda, chunk_elements=256, fallback=False) as transfer:
        for current in (0, 1):
            with torch.cuda.device(current):
                for device in (torch.device("cuda", 0), second_device) * 3:
                    destination = torch.full((10_007,), -1.0, dtype=torch.bfloat16, device=device)
                    torch.cuda.synchronize(device)
                    transfer.submit(destination, source + current).wait()
                    assert torch.equal(destination.cpu(), (source + current).bfloat16())
                assert torch.cuda.current_device() == current


def test_threads_on_both_devices_share_one_transfer(cuda, second_device):
    wrong = []
    with PinnedStagedTransfer(accelerator=cuda, chunk_elements=256, fallback=False) as transfer:

        def work(value):
            device = torch.device("cuda", int(value) % 2)
            for _ in range(50):  # the thread's current device is 0, whatever the destination's is
                destination = torch.empty(10_007, dtype=torch.bfloat16, device=device)
                transfer.copy(destination, torch.full((10_007,), value))
                if not (destination.cpu() == value).all():
                    wrong.append(value)

        run_threads(work, map(float, range(4)))
    assert not wrong


def test_values_are_right_behind_a_busy_stream(cuda):
    """Work that is queued before the copy and writes its destination must not overtake it."""
    source = torch.randn(2**22)
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    destination = cuda.device_empty(2**22, dtype=torch.bfloat16)
    for transfer in (PageableTransfer(accelerator=cuda), PinnedStagedTransfer(accelerator=cuda, chunk_elements=2**18)):
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(20):
                    busy @ busy
                destination.fill_(-1)
                copy = transfer.submit(destination, source)
            copy.wait()
            assert torch.equal(destination.cpu(), source.bfloat16())
        transfer.close()


@pytest.mark.parametrize("strategy", ["pageable", "pinned_staged", "pinned_direct"])
def test_a_graph_that_is_captured_stays_whole_and_so_does_the_transfer(cuda, strategy):
    source, destination = torch.randn(2**20), cuda.device_empty(2**20, dtype=torch.bfloat16)
    transfer = build_transfer({"strategy": strategy}, cuda)
    transfer.prepare(source)
    transfer.copy(destination, source)
    ones, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = ones * 2
        for ask in (transfer.submit, transfer.copy):
            with pytest.raises(GraphCaptureError):
                ask(destination, source)
    ones.fill_(3)
    graph.replay()
    assert (twice == 6).all()
    destination.fill_(-1)
    transfer.copy(destination, source)
    assert torch.equal(destination.cpu(), source.bfloat16())
    transfer.close()
    assert transfer.pinned_bytes == 0


def test_two_transfers_in_two_threads(cuda):
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with build_transfer({"strategy": "pinned_direct"}, cuda) as transfer, torch.cuda.stream(torch.cuda.Stream()):
            sources = [torch.randn(2**20 + seed, generator=generator) for _ in range(4)]
            destinations = [cuda.device_empty(2**20 + seed, dtype=torch.bfloat16) for _ in sources]
            for source in sources[:2]:  # the other ones are staged
                transfer.prepare(source)
            for _ in range(25):
                copies = [transfer.submit(*pair) for pair in zip(destinations, sources, strict=True)]
                for copy, destination, source in zip(copies, destinations, sources, strict=True):
                    copy.wait()
                    if not torch.equal(destination.cpu(), source.bfloat16()):
                        wrong.append(seed)
                    source.add_(1)

    run_threads(work, range(2), seconds=120)
    assert not wrong


def test_a_fork_after_page_locking(cuda):
    done = run_program(
        """
        import os, torch
        from accelerators import get_accelerator
        from transfer import build_transfer
        from transfer.errors import ForkedProcessError

        cuda = get_accelerator("cuda")
        transfer = build_transfer({"strategy": "pinned_direct"}, cuda)
        source = torch.arange(2.0**20)
        destination = cuda.device_empty(2**20, dtype=torch.bfloat16)
        transfer.prepare(source)
        transfer.copy(destination, source)
        child = os.fork()
        if child == 0:
            try:
                transfer.copy(destination, source)
            except ForkedProcessError:
                transfer.close()
                os._exit(7 if source[-1].item() == 2**20 - 1 else 1)  # OpenMP does not survive a fork
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        source.add_(1)
        transfer.copy(destination, source)
        assert torch.equal(destination.cpu(), source.bfloat16())
        transfer.close()
        assert transfer.pinned_bytes == 0
        """,
        forked=False,
        tear_down=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("strategy", ["pinned_staged", "pinned_direct"])
def test_a_sample_is_read_behind_the_copy_and_the_host_waits_for_neither(cuda, strategy):
    source = torch.randn(2**22)
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    destination = cuda.device_empty(2**22, dtype=torch.bfloat16)
    config = {"strategy": strategy, "fallback": False, "verify": "sample"}
    with build_transfer({**config, "pinned_staged": {"chunk_elements": 2**22}}, cuda) as transfer:
        transfer.prepare(source)
        transfer.copy(destination, source)  # pins
        for _ in range(30):
            busy @ busy
        behind = torch.cuda.Event()
        behind.record()
        copy = transfer.submit(destination, source)
        assert not behind.query(), "submit has waited for the work that was queued before"
        assert not copy.done
        copy.wait()
        assert behind.query()
        assert torch.equal(destination.cpu(), source.bfloat16())


@pytest.mark.parametrize("mode", ["sample", "full"])
@pytest.mark.parametrize("columns", [1, 7])
def test_a_wrong_element_is_found(cuda, mode, columns):
    class Spoils(PageableTransfer):
        def _submit(self, destination, source):
            copy = super()._submit(destination, source)
            destination[-1] += 1  # the last row; a sample always has the last element
            return copy

    source = torch.ones(10_003, columns)
    destination = torch.zeros(10_003, 8, dtype=torch.bfloat16, device="cuda")[:, :columns]
    register_strategy("spoils", Spoils)
    try:
        transfer = build_transfer({"strategy": "spoils", "verify": mode}, cuda)
        with pytest.raises(VerificationError) as caught:
            transfer.copy(destination, source)
    finally:
        unregister_strategy("spoils")
    assert caught.value.last == 10_003 * columns - 1
    assert caught.value.found == "2.0 (0x4000)"
    right = build_transfer({"verify": mode}, cuda)
    right.copy(destination, source)
    right.close()
    assert (destination == 1).all()
