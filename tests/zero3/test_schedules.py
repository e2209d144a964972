"""ZeRO-3's step under other orders of its copies: on a stand-in with DeepSpeed's order of a step."""

import pytest

from accelerators.simulated import ScheduleError, explore, sample
from tests.zero3.stand_ins import SteppingStage3, TiledStage3
from transfer import build_transfer, zero3
from transfer.zero3 import tiles
from transfer.zero3.attachment import Attachment

#: The system need not be asked for a budget each time.
SMALL = {"chunk_elements": 3, "max_page_locked": 4096}
DIRECT = {"strategy": "pinned_direct", "pinned_direct": {"mapped": False, **SMALL}, "fallback": False}
MAPPED = {"strategy": "pinned_direct", "pinned_direct": SMALL, "fallback": False}
STAGED = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}
CONFIGS = {"direct": DIRECT, "mapped": MAPPED, "staged": STAGED}


def steps(config, sub_groups=3, number=2, swapped=False, tiled=False):
    """Some steps of a stand-in; every partition holds its master when parameters are gathered, and afterwards."""

    def program(accelerator):
        optimizer = (TiledStage3 if tiled else SteppingStage3)(accelerator, sub_groups)
        if swapped:
            optimizer.use_swap_buffers(accelerator)
        transfer = build_transfer(config, accelerator)
        zero3.attach(optimizer, transfer)
        try:
            for step in range(1, number + 1):
                optimizer.step()
                expected = [[float(value + each + step) for value in range(8)] for each in range(sub_groups)]
                assert optimizer.seen_at_gather == expected, f"step {step}: what parameters are gathered from"
                assert optimizer.values() == expected, f"step {step}: what is left"
        finally:
            zero3.detach(optimizer)
            transfer.close()
        assert accelerator.pinned_bytes == (32 if swapped else 0)

    return program


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("swapped", [False, True], ids=["in memory", "in swap buffers"])
def test_drawn_orders_of_a_step(config, swapped, schedule_seeds):
    sample(steps(config, swapped=swapped), schedule_seeds)


def test_drawn_orders_of_a_step_in_tiles(schedule_seeds, monkeypatch):
    monkeypatch.setattr(tiles, "ALIGNMENT_ELEMENTS", 2)
    monkeypatch.setattr(tiles, "default_tile_elements", lambda: 3)
    sample(steps(DIRECT, tiled=True), schedule_seeds)


@pytest.mark.parametrize("swapped", [False, True], ids=["in memory", "in swap buffers"])
def test_every_order_of_a_small_step(swapped):
    whole = {**MAPPED, "pinned_direct": {**SMALL, "chunk_elements": 8}}  # from swap buffers: a copy and a cast for each
    assert explore(steps(whole, sub_groups=3, number=1, swapped=swapped)) > 5


#: The wait that is forgotten, and whether it is one for masters in swap buffers alone.
FORGOTTEN = {
    "the end of a step waits for nothing": ("finish", lambda self: self._in_flight.clear(), False),
    "a swap buffer is free at once": ("release_source", lambda self, sub_group_id: None, True),
}


@pytest.mark.parametrize("mistake", FORGOTTEN)
@pytest.mark.parametrize("config", [DIRECT, MAPPED], ids=["direct", "mapped"])
def test_a_forgotten_wait_is_found_and_one_copy_that_is_late_shows_it(mistake, config, monkeypatch):
    method, wrong, swapped = FORGOTTEN[mistake]
    monkeypatch.setattr(Attachment, method, wrong)
    with pytest.raises(ScheduleError, match=r"has 1 deviation from[^*]*\* copy \d+ is held back") as caught:
        sample(steps(config, swapped=swapped), range(50))
    assert len(caught.value.schedule.deviations) == 1
