"""``strategy: measured``: by the machine's profile, and by the default policy where there is none of this machine."""

import os
import warnings

import pytest
import torch

from accelerators.hardware import cores, cpu_model
from transfer import (
    ConfigError,
    MachineProfile,
    MachineProfileWarning,
    PageableTransfer,
    PinnedDirectTransfer,
    PinnedStagedTransfer,
    TransferPolicy,
    build_transfer,
)
from transfer.measured.estimate import settings_of

LARGE = 2**20


def timed(strategy, *, copy, submit, total):
    """Times of a strategy with its defaults."""
    times = {"elements": LARGE, "copy_seconds": copy, "submit_seconds": submit, "total_seconds": total}
    return {"strategy": strategy.name, "settings": settings_of(strategy.Config()), "times": [times]}


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Writes a profile of this machine, changed as asked, where ``measured`` looks for it."""

    def write(**changes):
        fields = {
            "machine": {"accelerator": "simulated", "device": "simulated", "cpu": cpu_model(), "cores": cores()},
            "measured": {
                "date": "2026-11-30",
                "torch_version": torch.__version__,
                "ranks": 1,
                "threads_per_rank": torch.get_num_threads(),
            },
            "copies": [
                timed(PinnedDirectTransfer, copy=4.01e-3, submit=1e-5, total=4.2e-3),
                timed(PinnedStagedTransfer, copy=3.05e-3, submit=1.05e-3, total=3.05e-3),
                timed(PageableTransfer, copy=9e-3, submit=9e-3, total=9e-3),
            ],
            "optimizer": {"name": "Adam", "updates": [{"elements": LARGE, "seconds": 10.5e-3}]},
        }
        MachineProfile(**{**fields, **changes}).save(tmp_path / "profile.yaml")

    monkeypatch.setenv("H2D_PROFILE", str(tmp_path / "profile.yaml"))
    for name in [name for name in os.environ if "LOCAL" in name and "SIZE" in name]:
        monkeypatch.delenv(name)
    return write


def pair(simulated):
    return simulated.device_empty(LARGE, dtype=torch.bfloat16), torch.zeros(LARGE)


def test_the_cheapest_wins_and_the_reason_quotes_the_numbers(simulated, profile):
    profile()
    destination, source = pair(simulated)
    source = simulated.pin_empty(LARGE, dtype=torch.float32)
    deferred = TransferPolicy({"strategy": "measured"}, simulated).select(destination, source)
    assert deferred.strategy == "pinned_direct"  # 10 us of the host, the rest behind the update
    assert deferred.reason == (
        "For 1048576 elements the machine profile expects pinned_direct 10 us, pinned_staged 1.05 ms, pageable 9 ms "
        "of waiting, with 10.5 ms of host updates to hide behind."
    )
    config = {"strategy": "measured", "completion": "immediate"}
    immediate = TransferPolicy(config, simulated).select(destination, source)
    assert immediate.strategy == "pinned_staged"
    assert "pinned_staged 3.05 ms, pinned_direct 4.01 ms" in immediate.reason


def test_what_may_not_be_page_locked_is_no_candidate(simulated, profile):
    profile()
    destination, source = pair(simulated)
    config = {"strategy": "measured", "pinned_direct": {"page_lock": False}}
    assert TransferPolicy(config, simulated).select(destination, source).strategy == "pinned_staged"
    pinned = simulated.pin_empty(LARGE, dtype=torch.float32)
    assert TransferPolicy(config, simulated).select(destination, pinned).strategy == "pinned_direct"
    strided = simulated.pin_empty(2, LARGE // 2, dtype=torch.float32).t()
    chosen = TransferPolicy(config, simulated).select(destination.view(LARGE // 2, 2), strided)
    assert chosen.strategy == "pinned_staged"


def test_rules_and_small_copies_come_first(simulated, profile):
    profile()
    small = simulated.device_empty(8, dtype=torch.bfloat16), torch.zeros(8)
    assert TransferPolicy({"strategy": "measured"}, simulated).select(*small).strategy == "pageable"
    config = {"strategy": "measured", "rules": [{"when": {"at_least": 1}, "use": "pinned_staged"}]}
    assert TransferPolicy(config, simulated).select(*pair(simulated)).reason.startswith("rules[0]")


def test_dtypes_that_were_not_measured_go_by_the_default(simulated, profile):
    profile()
    destination, source = simulated.device_empty(LARGE, dtype=torch.float32), torch.zeros(LARGE)
    chosen = TransferPolicy({"strategy": "measured"}, simulated).select(destination, source)
    assert chosen == TransferPolicy({}, simulated).select(destination, source)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "There is no profile of this machine yet; `h2d tune` measures it in a minute."),
        (
            {"machine": {"accelerator": "cuda", "device": "x", "cpu": "x", "cores": 1}},
            "another machine: its accelerator is 'cuda', here it is 'simulated'",
        ),
        (
            {"measured": {"date": "2026-11-30", "torch_version": "2", "ranks": 8, "threads_per_rank": 1}},
            "with 8 ranks on this host, and this process has 1",
        ),
    ],
)
def test_without_a_profile_of_this_machine_the_defaults_apply_after_one_warning(
    simulated, profile, changes, reason, tmp_path, monkeypatch
):
    if changes is None:
        monkeypatch.delenv("H2D_PROFILE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    else:
        profile(**changes)
    transfer = build_transfer({"strategy": "measured"}, simulated)
    destination, source = pair(simulated)
    with pytest.warns(MachineProfileWarning, match="falls back to the default policy") as caught:
        transfer.copy(destination, source)
    assert reason in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transfer.copy(destination, source)
    assert transfer.policy.select(destination, source) == TransferPolicy({}, simulated).select(destination, source)
    transfer.close()


def test_a_broken_profile_is_an_error_when_the_policy_is_made(tmp_path, monkeypatch):
    (tmp_path / "profile.yaml").write_text("machine_profile:\n  format_version: 2\n  wires: []\n")
    monkeypatch.setenv("H2D_PROFILE", str(tmp_path / "profile.yaml"))
    with pytest.raises(ConfigError, match="profile.yaml:3: .*wires"):
        build_transfer({"strategy": "measured"})
    build_transfer({})


def test_copies_are_right_whatever_is_chosen(simulated, profile):
    profile()
    destination, _ = pair(simulated)
    source = torch.randn(LARGE, generator=torch.Generator().manual_seed(1))
    with build_transfer({"strategy": "measured"}, simulated) as transfer:
        transfer.prepare(source)
        transfer.submit(destination, source).wait()
        assert torch.equal(destination, source.bfloat16())
        assert transfer.stats()["pinned_direct"].copies == 1
        transfer.copy(destination.zero_(), source)  # nothing hides a copy that is waited for at once
        assert torch.equal(destination, source.bfloat16())
        assert transfer.stats()["pinned_staged"].copies == 1
