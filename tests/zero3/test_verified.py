"""``verify`` under ZeRO-3: a wrong copy ends the step before parameters are gathered, with its sub-group."""

import typing

import pytest
import torch

from tests.zero3.stand_ins import SteppingStage3, TiledStage3
from tests.zero3.swapping import SwappingStage3
from tests.zero3.test_deferred import DIRECT, STAGED, after
from transfer import (
    HostToDeviceTransfer,
    InFlightCopy,
    VerificationError,
    build_transfer,
    register_strategy,
    unregister_strategy,
    zero3,
)
from transfer.nvme import swap_in
from transfer.zero3 import plan, tiles

MODES = pytest.mark.parametrize("mode", ["sample", "full"])


class Spoils(HostToDeviceTransfer):
    """Copies right, but for one element of each copy whose number is in ``spoilt``; counts from 0."""

    name = "spoils"
    reads_swapped = True
    spoilt: typing.ClassVar = {}
    made = 0

    def _submit(self, destination, source):
        source = source if isinstance(source, torch.Tensor) else swap_in(source)
        self.accelerator.enqueue_copy(destination, source)
        self.accelerator.synchronize()
        if Spoils.made in self.spoilt:
            destination[self.spoilt[Spoils.made]] = 77
        Spoils.made += 1
        return InFlightCopy()


@pytest.fixture
def spoil(monkeypatch):
    """Spoils one element of the copies with these numbers."""
    monkeypatch.setattr(Spoils, "made", 0)
    register_strategy("spoils", Spoils)
    yield lambda spoilt: monkeypatch.setattr(Spoils, "spoilt", spoilt)
    unregister_strategy("spoils")


def verified(simulated, mode, **config):
    return build_transfer({"verify": mode, "strategy": "spoils", **config}, simulated)


@MODES
@pytest.mark.parametrize("config", [DIRECT, STAGED, {**STAGED, "completion": "immediate"}], ids=str)
def test_right_copies_pass(simulated, config, mode):
    optimizer = SteppingStage3(simulated, sub_groups=3)
    zero3.attach(optimizer, build_transfer({**config, "verify": mode}, simulated))
    for steps in (1, 2):
        optimizer.step()
        assert optimizer.seen_at_gather == [after(each, steps) for each in range(3)]
    zero3.detach(optimizer)


def test_a_sample_puts_nothing_off_sooner_than_without(simulated):
    optimizer = SteppingStage3(simulated, sub_groups=3)
    zero3.attach(optimizer, build_transfer({**DIRECT, "verify": "sample"}, simulated))
    optimizer.step()
    assert optimizer.seen_at_update[2][:2] == [[-1.0] * 8] * 2, "submitted, and not waited for"


@MODES
@pytest.mark.parametrize("completion", ["deferred", "immediate"])
def test_a_wrong_copy_ends_the_step_before_parameters_are_gathered(simulated, spoil, mode, completion):
    optimizer = SteppingStage3(simulated, sub_groups=3)
    transfer = verified(simulated, mode, completion=completion)
    zero3.attach(optimizer, transfer)
    spoil({1: 5})
    with pytest.raises(VerificationError) as caught:
        optimizer.step()
    error = caught.value
    assert (error.sub_group, error.first, error.last, error.wrong) == (1, 5, 5, 1)
    assert str(error).startswith(
        "a copy of sub-group 1 to torch.bfloat16 (8,) on cpu left wrong values: element 5 is 77.0 (0x429a) and must "
        "be 7.0 (0x40e0). 1 of 8 compared elements are wrong, from 5 to 5."
    )
    assert "post" not in optimizer.calls, "nothing was gathered"
    last = 2 if completion == "deferred" else 1  # the others were updated and copied
    masters = [master.tolist() for master in optimizer.fp32_partitioned_groups_flat]
    assert masters[: last + 1] == [after(each) for each in range(last + 1)]
    assert optimizer.values()[0] == after(0)
    assert optimizer.values()[1] == [2, 3, 4, 5, 6, 77, 8, 9]

    optimizer.step()  # every master is copied again
    assert optimizer.seen_at_gather == [master.tolist() for master in optimizer.fp32_partitioned_groups_flat]
    zero3.detach(optimizer)
    transfer.close()
    assert simulated.pinned_bytes == 0


@MODES
def test_a_wrong_tile_is_found_by_its_place_in_the_partition(simulated, spoil, mode, monkeypatch):
    monkeypatch.setattr(plan, "updates_in_parts", lambda _: True)
    monkeypatch.setattr(tiles, "ALIGNMENT_ELEMENTS", 3)
    monkeypatch.setattr(tiles, "default_tile_elements", lambda: 3)
    optimizer = TiledStage3(simulated)
    zero3.attach(optimizer, verified(simulated, mode))
    spoil({3: 0})  # of each sub-group, two tiles of 3 elements are one copy, and one of 2 is another
    with pytest.raises(VerificationError) as caught:
        optimizer.step()
    assert optimizer.optimizer.ds_opt_adam.updated == [3, 3, 2] * 3
    assert (caught.value.sub_group, caught.value.first, caught.value.last) == (1, 6, 6)
    assert caught.value.expected.startswith("8.0 ")
    assert "post" not in optimizer.calls


@MODES
def test_a_wrong_copy_outside_of_a_step(simulated, spoil, mode):
    optimizer = SteppingStage3(simulated, sub_groups=2)
    zero3.attach(optimizer, verified(simulated, mode))
    spoil({0: 0})
    with pytest.raises(VerificationError, match="of sub-group 1 to"):
        optimizer._reassign_or_swap_out_partitioned_parameters(1)
    optimizer._reassign_or_swap_out_partitioned_parameters(1)
    assert optimizer.values()[1] == after(1, 0)


@MODES
def test_a_wrong_copy_from_a_swap_file(simulated, spoil, mode, tmp_path):
    optimizer = SwappingStage3(simulated, tmp_path, in_memory=(1,))
    zero3.attach(optimizer, verified(simulated, mode))
    optimizer.step()
    spoil({Spoils.made + 2: 3})
    with pytest.raises(VerificationError, match="of sub-group 2 to .*element 3 is 77"):
        optimizer.reset_swap_buffers()


@MODES
def test_swap_buffers_are_reused_while_copies_are_compared(simulated, mode):
    optimizer = SteppingStage3(simulated, sub_groups=3)
    optimizer.use_swap_buffers(simulated)
    zero3.attach(optimizer, build_transfer({**DIRECT, "verify": mode}, simulated))
    for steps in (1, 2):
        optimizer.step()
        assert optimizer.seen_at_gather == [after(each, steps) for each in range(3)]
