"""``h2d bench zero3 --nvme``: whole steps whose optimizer state DeepSpeed keeps in files."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from accelerators import deepspeed_aio
from tests.running import run_program, run_python
from transfer import StrategyUnavailableError, cli
from transfer.cli.bench_zero3 import on_nvme as zero3_bench_nvme
from transfer.cli.bench_zero3 import report as zero3_report
from transfer.cli.bench_zero3.nvme_peers import host_memory
from transfer.nvme.mounts import file_system

#: Each sub-group has the 262,144 elements from which DeepSpeed swaps.
TINY = {"layers": 1, "hidden": 512, "sub_groups": 4, "batch": 1, "sequence": 8, "optimizer": "adamw", "steps": 1}
needs_aio = pytest.mark.skipif(
    "H2D_TEST_AIO" not in os.environ, reason="DeepSpeed's aio op takes minutes to build; H2D_TEST_AIO=1 asks for it."
)
#: Where the op was built, and what looks for it and its compiler.
ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME", "TORCH_EXTENSIONS_DIR") if name in os.environ}


@needs_aio
@pytest.mark.slow
def test_steps_with_state_in_files(tmp_path):
    given = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", value)]
    done = run_python(
        *("-m", "transfer.cli", "bench", "zero3", "--accelerator", "simulated", "--threads", 1, *given, "--json"),
        *("--ranks", 2, "--nvme", tmp_path, "--nvme-pipeline", "--peers", "pipelined"),
        *("--strategies", "pinned_staged", "nvme_swapped"),
        environment=ENVIRONMENT,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads(done.stdout)
    assert report["nvme"]["file_system"] == file_system(tmp_path)
    assert report["nvme"]["pipelined"] is True
    assert report["engine"]["swapped_sub_groups"] == len(report["engine"]["sub_group_elements"]) > 1
    verdicts = {one["variant"]: one["right_bits"] for one in report["measurements"]}
    assert verdicts.pop("no copy-back") is None
    assert {"deepspeed", "pinned_staged, immediate", "pinned_staged, deferred", "default"} <= set(verdicts)
    assert set(verdicts.values()) == {True}
    (refused,) = [entry for entry in report["not_run"] if entry["variant"] == "nvme_swapped"]
    assert "ZeRO-3 copies back from memory" in refused["reason"]
    assert not [*tmp_path.iterdir()], "swap files are left"


@needs_aio
@pytest.mark.slow
def test_wrong_bits_are_seen_although_the_masters_are_in_files(tmp_path):
    options = {
        **TINY,
        "accelerator": "simulated",
        "config": None,
        "nvme": str(tmp_path),
        "nvme_pipeline": False,
        "verify": [],
        "limit_seconds": None,
        "strategies": ["copies_nothing", "pageable", "refusing", "wrong_in_one_bit"],
    }
    done = run_program(
        f"""
        import json
        from transfer.cli.measuring.ranks import launch

        worker = "tests.cli.zero3_worker:measure"
        print(json.dumps(launch(worker, {options!r}, threads=1, deepspeed=True)))
        """,
        environment=ENVIRONMENT,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    watched = json.loads(done.stdout)
    verdicts = {one["variant"].partition(",")[0]: one["right_bits"] for one in watched["measurements"]}
    assert verdicts.pop("copies_nothing") is False
    assert verdicts.pop("wrong_in_one_bit") is False
    assert verdicts.pop("no copy-back") is None
    assert set(verdicts.values()) == {True}
    assert {"deepspeed", "default", "pageable"} <= set(verdicts)
    assert ("refusing, immediate", "not on this machine") in {
        (entry["variant"], entry["reason"]) for entry in watched["not_run"]
    }
    sub_groups = len(watched["engine"]["sub_group_elements"])
    assert len(watched["rewrites"]) >= 2 + 2 * 2
    assert all(before < after == sub_groups for before, after in watched["rewrites"])
    assert watched["pinned_bytes_at_the_end"] == 0


@needs_aio
@pytest.mark.slow
def test_whole_engines_take_turns_and_have_the_bits_of_deepspeed(tmp_path):
    given = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", value)]
    given[given.index("adamw")] = "cpu_adam"  # whose state passes through the step
    done = run_python(
        *("-m", "transfer.cli", "bench", "zero3", "--accelerator", "simulated", "--threads", 1, *given, "--json"),
        *("--nvme", tmp_path, "--peers", "pipelined", "half", "all", "memory"),
        environment=ENVIRONMENT,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads(done.stdout)
    rows = {one["variant"]: one for one in report["peers"]}
    names = ("pipelined", "half resident", "all resident", "in memory")
    assert list(rows) == ["deepspeed", f"deepspeed, {names[0]}", "default", *(f"default, {name}" for name in names[1:])]
    assert rows.pop("deepspeed")["right_bits"] is None
    assert {one["right_bits"] for one in rows.values()} == {True}
    assert rows["default"]["engine"]["swapped_sub_groups"] > 1
    assert rows["default, in memory"]["engine"]["swapped_sub_groups"] == 0
    assert report["nvme"]["aio"]["intra_op_parallelism"] >= 1
    assert (report["measurements"], report["not_run"]) == ([], [])
    assert not [*tmp_path.iterdir()], "swap files are left"


def test_rows_of_files_and_of_memory_are_not_mixed_up(capsys):
    for arguments, expected in (
        (["--nvme", "/drive", "--peers", "fsdp2"], "fsdp2 is none of tuned, pipelined, half, all, memory"),
        (["--peers", "tuned"], "tuned is none of offload_param, superoffload, fsdp2"),
        (["--nvme", "/drive", "--layers", "1", "--hidden", "448"], "expected a multiple of 128, not 448"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["bench", "zero3", "--accelerator", "simulated", *arguments])
        assert caught.value.code == 2
        assert expected in capsys.readouterr().err


def test_what_stays_in_memory_is_half_or_all_of_the_state():
    masters = 4 * 1000
    assert host_memory("default", masters) == host_memory("deepspeed", masters) == 0
    assert host_memory("default, half resident", masters) == 3 * masters // 2
    assert host_memory("default, all resident", masters) > 3 * masters


def test_without_the_op_it_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_aio, "unavailable_reason", lambda: "The op is on holiday.")
    assert cli.main(["bench", "zero3", "--accelerator", "simulated", "--nvme", str(tmp_path), "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "h2d bench: --nvme needs DeepSpeed's aio op. The op is on holiday.\n"
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_told(capsys, monkeypatch):
    monkeypatch.setattr(deepspeed_aio, "unavailable_reason", lambda: None)
    assert cli.main(["bench", "zero3", "--accelerator", "simulated", "--nvme", "/proc/nowhere"]) == 1
    assert "/proc/nowhere" in capsys.readouterr().err


def test_a_pipeline_needs_a_directory(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "zero3", "--nvme-pipeline"])
    assert caught.value.code == 2
    assert "--nvme-pipeline goes with --nvme DIR" in capsys.readouterr().err


def test_deepspeeds_section():
    assert zero3_bench_nvme.offload_section({"nvme": None, "nvme_pipeline": False}) == {
        "device": "cpu",
        "pin_memory": True,
    }
    for pipelined, buffers in ((False, 5), (True, 12)):
        section = zero3_bench_nvme.offload_section({"nvme": "/drive", "nvme_pipeline": pipelined})
        assert (section["device"], section["nvme_path"], section["buffer_count"]) == ("nvme", "/drive", buffers)
        assert section["pipeline_read"] is section["pipeline_write"] is pipelined


def test_memory_that_may_not_be_locked_is_an_error_and_not_an_abort(monkeypatch):
    asked = []
    monkeypatch.setattr(zero3_bench_nvme, "may_lock_bytes", lambda num_bytes: asked.append(num_bytes) or num_bytes == 0)
    zero3_bench_nvme.check_lock_limit({"device": "cpu"}, 1000)
    with pytest.raises(StrategyUnavailableError, match="need 32000 bytes of locked memory"):
        zero3_bench_nvme.check_lock_limit({"buffer_count": 8}, 1000)
    assert asked == [0, 32000]


def test_state_that_has_stayed_in_memory_is_an_error():
    optimizer = SimpleNamespace(
        swap_optimizer=True,
        fp32_partitioned_groups_flat=[torch.zeros(8), torch.zeros(2)],
        _swappable_optimizer_subgroup=lambda sub_group_id: False,
    )
    with pytest.raises(StrategyUnavailableError, match="give fewer --sub-groups or more --parameters"):
        zero3_bench_nvme.check_swapped(optimizer)


def test_a_strategy_for_files_is_listed_with_its_reason_where_it_is_asked_for():
    (entry,) = zero3_bench_nvme.not_for_steps({"strategies": ["pageable", "nvme_swapped"]})
    assert entry["variant"] == "nvme_swapped"


def test_the_title_says_where_the_state_is():
    engine = {"swapped_sub_groups": 3, "sub_group_elements": [1, 2, 3, 4]}
    swapped = zero3_report.swapped
    assert swapped({"file_system": "xfs", "pipelined": True}, engine) == "the state of 3 of 4 swapped to xfs, pipelined"
    assert "which is memory: no drive" in swapped({"file_system": "tmpfs", "pipelined": False}, engine)


def test_masters_are_read_from_deepspeeds_files_where_they_are_swapped(tmp_path):
    values, kept, placeholder = torch.randn(8), torch.randn(3), torch.zeros(1)
    placeholder.ds_id = 7  # type: ignore[attr-defined]
    (tmp_path / "master.swp").write_bytes(values.numpy().tobytes() + bytes(480))  # padded, as DeepSpeed does
    info = SimpleNamespace(
        tensors=[SimpleNamespace(swap_path=str(tmp_path / "master.swp"))],
        dtype=lambda: torch.float32,
        numel=lambda: 8,
        release_unswapped_gradients=None,
    )
    optimizer = SimpleNamespace(
        swap_optimizer=True,
        fp32_partitioned_groups_flat=[placeholder, kept],
        _swappable_optimizer_subgroup=lambda sub_group_id: sub_group_id == 0,
        optimizer_swapper=SimpleNamespace(swap_params_info={7: info}),
    )
    found = list(zero3_bench_nvme.masters(optimizer))
    assert [master.tolist() for master in found] == [values.tolist(), kept.tolist()]
    info.tensors = []
    with pytest.raises(StrategyUnavailableError, match="in an unknown way"):
        list(zero3_bench_nvme.masters(optimizer))
