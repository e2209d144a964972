"""What only a real GPU can show: memory bounds, several devices, sizes past 2^31."""

import threading

import pytest
import torch

from accelerators.testing import accelerator_or_skip
from transfer import PageableTransfer, PinnedStagedTransfer, build_transfer


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

        threads = [threading.Thread(target=work, args=(float(value),), daemon=True) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
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
