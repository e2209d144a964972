"""Negative views, such as imaginary parts of conjugates: torch drops their signs in some casts on the host."""

import pytest
import torch

from transfer import InvalidTensorError, StrategyUnavailableError, build_transfer, nvme

STRATEGIES = [
    {"strategy": "pageable"},
    {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}},
    {"strategy": "pinned_direct"},
    {},
    {"verify": "full"},
]
DTYPES = [
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
]


def values(numel, dtype):
    return torch.linspace(-3, 5, numel, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("numel", [1, 7, 1000])
@pytest.mark.parametrize(("source_dtype", "dtype"), DTYPES)
@pytest.mark.parametrize("config", STRATEGIES, ids=str)
def test_either_side_may_be_one(simulated, config, source_dtype, dtype, numel):
    plain = values(numel, source_dtype)
    positive, negative = plain.double().to(dtype).tolist(), plain.double().neg().to(dtype).tolist()
    with build_transfer(config, simulated) as transfer:
        for source, memory in ((torch._neg_view(plain), negative), (plain, positive)):
            destination = simulated.device_empty(numel, dtype=dtype)
            transfer.copy(destination, source)
            simulated.synchronize()
            assert destination.tolist() == memory
            transfer.copy(torch._neg_view(destination), source)
            simulated.synchronize()
            assert destination.tolist() == [-each for each in memory], "its memory has the other sign"
    assert plain.tolist() == values(numel, source_dtype).tolist(), "the source itself"


def test_the_imaginary_part_of_a_conjugate(simulated):
    number = torch.complex(torch.zeros(5), torch.arange(1.0, 6.0))
    destination = simulated.device_empty(5, dtype=torch.float16)
    build_transfer({}, simulated).copy(destination, number.conj().imag)
    simulated.synchronize()
    assert destination.tolist() == [-1, -2, -3, -4, -5]


def test_a_strategy_that_cannot_refuses_it(simulated):
    source = simulated.pin_empty(4, dtype=torch.float32).fill_(1)
    destination = simulated.device_empty(4, dtype=torch.float16)
    destination.fill_(7)
    with (
        build_transfer({"strategy": "pinned_direct", "fallback": False}, simulated) as transfer,
        pytest.raises(StrategyUnavailableError),
    ):
        transfer.copy(destination, torch._neg_view(source))
    assert destination.tolist() == [7] * 4
    simulated.unpin_memory(source)


def test_values_of_a_file(simulated, tmp_path):
    plain = values(7, torch.float32)
    swapped = nvme.swap_out(torch._neg_view(plain), tmp_path)
    destination = simulated.device_empty(7, dtype=torch.float16)
    with build_transfer({}, simulated) as transfer:
        transfer.copy(destination, swapped)
        simulated.synchronize()
        assert destination.tolist() == (-plain.double()).half().tolist()
        with pytest.raises(InvalidTensorError, match="negative view"):
            transfer.copy(torch._neg_view(destination), swapped)
    assert destination.tolist() == (-plain.double()).half().tolist()
