"""``h2d explain``: what would be chosen, why, and what would change it."""

import json

import pytest
import torch

from transfer import cli
from transfer.cli.explain.choices import Asker
from transfer.config import TransferConfig


def explained(capsys, *arguments):
    status = cli.main(["explain", "--accelerator", "simulated", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (report["schema_version"], report["command"]) == (1, "explain")
    return report


def changes(one):
    return {change["if"]: change["strategy"] for change in one["changes"]}


@pytest.fixture
def write(tmp_path):
    def write(text, name="transfer.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_the_defaults(capsys):
    small, large = explained(capsys, "--elements", "2^17", "2^28")["sub_groups"]
    assert (small["strategy"], small["bytes"], small["page_locked"]) == ("pageable", 2**18, True)
    # A page-locked source gains from 512 KiB at the destination on.
    assert changes(small) == {"it had at least 262,144 elements": "pinned_direct"}
    assert (large["strategy"], large["page_locked"]) == ("pinned_direct", True)
    assert changes(large) == {
        "the source were not page-locked": "pinned_staged",
        "it had at most 262,143 elements": "pageable",
    }
    assert large["reason"] == "The source is page-locked, so the device reads and casts it itself."


def test_a_configuration_and_each_of_its_parts(capsys, write):
    path = write("""
transfer:
  strategy: pinned_staged
  rules:
  - {when: {smaller_than: 4MiB}, use: pageable}
  - {when: {at_least: 1GiB}, use: pinned_direct}
""")
    report = explained(capsys, path, "--elements", "1e6", "1e8", "2^30")
    small, middle, large = report["sub_groups"]
    assert small["strategy"] == "pageable"
    assert small["reason"].startswith("rules[0] matches")
    assert changes(small)["rules[0] were left out"] == "pinned_staged"
    # 4 MiB in bf16.
    assert changes(small)["it had at least 2,097,152 elements"] == "pinned_staged"
    assert (middle["strategy"], middle["reason"]) == (
        "pinned_staged",
        "The configuration says `strategy: pinned_staged`.",
    )
    assert changes(middle)["`strategy` were left out"] == "pinned_direct", "it would then be page-locked"
    assert changes(middle)["it had at least 536,870,912 elements"] == "pinned_direct"
    assert large["strategy"] == "pinned_direct"
    assert changes(large)["rules[1] were left out"] == "pinned_staged"
    assert changes(large)["it had at most 536,870,911 elements"] == "pinned_staged"


def test_memory_that_is_not_page_locked(capsys, write):
    path = write("transfer: {pinned_direct: {page_lock: false, max_page_locked: 1MiB}}\n")
    report = explained(capsys, path, "--elements", "2^28", "--dtype", "fp16")
    (one,) = report["sub_groups"]
    assert (one["strategy"], one["page_locked"]) == ("pinned_staged", False)
    assert "`pinned_direct.page_lock` is false" in one["reason"]
    assert changes(one)["the source were page-locked (`prepare`)"] == "pinned_direct"
    assert report["page_locks"] == {"wanted_bytes": 0, "allowed_bytes": 2**20}
    assert report["dtype"] == "float16"


def test_the_sub_group_of_a_deepspeed_config(capsys, write):
    path = write(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 5e7}}), "ds.json")
    report = explained(capsys, path)
    assert report["sub_groups"][-1]["elements"] == 50_000_000
    assert any("nothing is copied back" in each for each in report["notes"])


def test_a_configuration_that_needs_a_profile_says_that_there_is_none(capsys, write, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = explained(capsys, write("transfer: {strategy: measured}\n"), "--elements", "2^20")
    assert any("There is no profile of this machine yet" in each for each in report["warnings"])


def test_people_read_lines_of_80_columns(capsys, write):
    path = write("transfer: {strategy: nvme_swapped, pinned_direct: {max_page_locked: 1MiB}}\n")
    assert cli.main(["explain", "--accelerator", "simulated", path]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "(simulated: it tests bits, not speed)" in out
    assert "2^28 elements (512 MiB), page-locked when ZeRO-3 is attached: pinned_direct" in out
    assert "Sources beyond that are not page-locked" in out


def test_nothing_of_the_size_is_allocated_or_pinned(simulated):
    asker = Asker(TransferConfig(), simulated, torch.bfloat16)
    found = asker.explain(2**33)
    assert (found["strategy"], found["bytes"]) == ("pinned_direct", 2**34)
    assert simulated.pinned_bytes == 0


def test_mistakes(capsys, write):
    assert cli.main(["explain", write("transfer: {strategi: x}\n")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Did you mean 'strategy'?" in err
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", "--accelerator", "simulatd"])
    assert ended.value.code == 2
    assert "Did you mean 'simulated'?" in capsys.readouterr().err
