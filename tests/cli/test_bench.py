"""``h2d bench``: what it measures, what it says about wrong bits, and how it says it."""

import argparse
import io
import json
import sys

import pytest
import torch

from accelerators import get_accelerator
from tests.cli import strategies
from tests.running import run_python
from transfer import cli, register_strategy, unregister_strategy
from transfer.cli.bench_copy import report as copy_report
from transfer.cli.bench_copy.report import with_figures
from transfer.cli.measuring import baselines, bits
from transfer.cli.measuring.baselines import DeepSpeedCopy
from transfer.cli.measuring.quantities import count, dtype_name, format_count

SMALL = ("--accelerator", "simulated", "--elements", "5000", "--rounds", "2")
BASELINES = ["link", "deepspeed", "ring 2 x 2^26", "pinned master", "pinned low-precision copy"]


@pytest.fixture(autouse=True)
def small_ring(request, monkeypatch):
    """The ring as first proposed fills 256 MiB for each size: one test has it so."""
    if "large_ring" not in request.fixturenames:
        monkeypatch.setitem(baselines.RING_CONFIG, "chunk_elements", 1000)


@pytest.fixture
def large_ring():
    """Asks for the ring as first proposed."""


@pytest.fixture
def registered():
    """Registers strategies of the tests, and forgets them afterwards."""
    names = []

    def register(name, strategy):
        register_strategy(name, strategy)
        names.append(name)

    yield register
    for name in names:
        unregister_strategy(name)


def report_of(capsys, *arguments):
    status = cli.main(["bench", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_every_strategy_and_baseline_is_measured(capsys, large_ring):
    status, report = report_of(capsys, *SMALL, "--elements", "3000", "2^12", "--dtypes", "bf16", "float16")
    assert status == 0
    assert report["schema_version"] == 2
    assert report["not_run"] == []
    assert {(one["dtype"], one["elements"]) for one in report["measurements"]} == {
        (dtype, elements) for dtype in ("bfloat16", "float16") for elements in (3000, 4096)
    }
    first = [one for one in report["measurements"] if (one["dtype"], one["elements"]) == ("float16", 4096)]
    names = [one["variant"] for one in first]
    assert names[:5] == BASELINES
    assert {"pageable", "pinned_staged"} <= set(names[5:])
    for one in first:
        assert one["right_bits"] is True
        assert len(one["seconds"]) == 2
        assert one["seconds"] == one["seconds_by_rank"][0]
        assert min(one["seconds"]) > 0
        assert one["destination_bytes"] == 8192
    extra = {one["variant"]: (one["pinned_bytes"], one["device_bytes"]) for one in first}
    assert extra["link"] == (8192, 0)
    assert extra["pinned master"] == (16384, 16384)
    assert extra["pinned low-precision copy"] == (8192, 0)
    assert extra["ring 2 x 2^26"] == (2 * 2**26 * 2, 0)
    assert extra["deepspeed"] == (0, 0)
    direct = next(one for one in first if one["variant"] == "pinned_direct")
    assert (direct["pinned_bytes"], direct["page_locked_bytes"]) == (0, 4 * 4096), "the source is no extra memory"
    assert [one["variant"] for one in first if one["summary"]] == BASELINES
    assert get_accelerator("simulated").pinned_bytes == 0


def test_what_it_ran_on_is_noted(capsys):
    _, report = report_of(capsys, *SMALL, "--strategies", "pageable")
    hardware = report["hardware"]
    assert hardware["accelerator"] == "simulated"
    assert hardware["torch"] == torch.__version__
    assert hardware["threads"] == torch.get_num_threads()
    assert set(hardware) >= {"device", "cpu", "cores", "deepspeed", "date"}


def test_json_is_all_that_is_printed():
    done = run_python("-m", "transfer.cli", "bench", *SMALL, "--json", "--strategies", "pageable", forked=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["command"] == "bench"
    assert "\x1b" not in done.stderr, "a progress bar without a terminal"


@pytest.mark.slow
def test_two_ranks_copy_at_once_and_each_has_its_own_file(tmp_path):
    arguments = (*SMALL, "--json", "--ranks", "2", "--strategies", "nvme_swapped", "--nvme", str(tmp_path))
    done = run_python("-m", "transfer.cli", "bench", *arguments, timeout=250, forked=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ranks"] == 2
    for one in report["measurements"]:
        first, second = one["seconds_by_rank"]
        assert first != second
        assert one["seconds"] == [max(pair) for pair in zip(first, second, strict=True)]
    assert "nvme_swapped" in {one["variant"] for one in report["measurements"]}
    assert not list(tmp_path.rglob("*.swap"))


@pytest.mark.parametrize("strategy", [strategies.WrongInOneBit, strategies.CopiesNothing, strategies.WrongAtLast])
def test_wrong_bits_are_seen_and_fail_the_command(capsys, registered, strategy):
    registered("spoilt", strategy)
    status, report = report_of(capsys, *SMALL)
    assert status == 1
    assert {one["variant"] for one in report["measurements"] if not one["right_bits"]} == {"spoilt"}
    assert cli.main(["bench", *SMALL, "--strategies", "spoilt"]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG") == 1
    assert out.count("equal") == len(BASELINES)


def test_what_cannot_run_is_listed_with_its_reason(capsys, registered):
    registered("refusing", strategies.Refuses)
    status, report = report_of(capsys, *SMALL)
    assert status == 0
    assert report["not_run"] == [
        {"elements": 5000, "dtype": "bfloat16", "variant": "refusing", "reason": "not on this machine"}
    ]
    cli.main(["bench", *SMALL, "--strategies", "refusing"])
    assert "not run: refusing: not on this machine" in capsys.readouterr().out


def test_a_source_is_page_locked_for_its_own_variant_alone(capsys, registered, monkeypatch):
    registered("locking", strategies.PageLocks)
    simulated = get_accelerator("simulated")
    pinned_sources = {}
    for cls in (strategies.PageLocks, DeepSpeedCopy):
        original = cls._submit

        def submit(self, destination, source, original=original, name=cls.__name__):
            pinned_sources.setdefault(name, set()).add(simulated.is_pinned(source))
            return original(self, destination, source)

        monkeypatch.setattr(cls, "_submit", submit)
    status, report = report_of(capsys, *SMALL)
    assert status == 0
    assert pinned_sources == {"PageLocks": {True}, "DeepSpeedCopy": {False}}
    (locking,) = [one for one in report["measurements"] if one["variant"] == "locking"]
    assert locking["page_locked_bytes"] == 20000
    seconds = locking["page_lock_seconds"]
    assert locking["figures"]["page_lock_seconds_per_gib"] == pytest.approx(seconds * 2**30 / 20000)
    page_lock = ("locking", "pinned_direct")
    assert all(
        (one["page_lock_seconds"] is None) == (one["variant"] not in page_lock) for one in report["measurements"]
    )
    assert simulated.pinned_bytes == 0
    cli.main(["bench", *SMALL, "--strategies", "locking"])
    memory = capsys.readouterr().out.partition("\nmemory\n")[2]
    row = next(line for line in memory.splitlines() if line.startswith("locking"))
    assert float(row.split()[3]) > 0


def test_an_accelerator_that_pins_nothing_has_a_sensible_table(capsys):
    arguments = ("--accelerator", "cpu", "--elements", "5000", "--rounds", "1")
    status, report = report_of(capsys, *arguments)
    assert status == 0
    assert {"deepspeed", "pageable"} <= {one["variant"] for one in report["measurements"]}
    reasons = {entry["variant"]: entry["reason"] for entry in report["not_run"]}
    assert {"link", "pinned master", "pinned low-precision copy", "ring 2 x 2^26", "pinned_staged"} <= set(reasons)
    assert "no device to pin it for" in reasons["link"]
    for one in report["measurements"]:
        assert one["figures"]["share_of_link"] is None
        assert one["figures"]["times_deepspeed"] > 0
    assert cli.main(["bench", *arguments]) == 0
    assert "not run: link:" in capsys.readouterr().out


def test_refused_pinning_is_a_reason_and_not_a_crash(capsys, monkeypatch):
    monkeypatch.setattr(get_accelerator("simulated"), "pin_limit_bytes", 12000)
    status, report = report_of(capsys, *SMALL)
    assert status == 0
    # 10,000 bytes for the link are allowed; with them nothing else is.
    assert "link" in {one["variant"] for one in report["measurements"]}
    reasons = {entry["variant"]: entry["reason"] for entry in report["not_run"]}
    assert set(reasons) >= {"ring 2 x 2^26", "pinned master", "pinned low-precision copy", "pinned_staged"}
    assert "Pinning 20000 bytes for the whole partition failed" in reasons["pinned master"]


def test_figures_are_those_of_the_raw_seconds():
    def measured(variant, *seconds_by_rank, page_lock_seconds=None):
        return {
            "variant": variant,
            "dtype": "bfloat16",
            "elements": 10**9,
            "destination_bytes": 2 * 10**9,
            "source_bytes": 4 * 2**30,
            "from_file": False,
            "page_lock_seconds": page_lock_seconds,
            "seconds_by_rank": seconds_by_rank,
        }

    link, deepspeed, fast = with_figures(
        [
            measured("link", [1.0, 1.0, 1.0], [1.0, 0.5, 1.0]),
            measured("deepspeed", [8.0, 9.0, 20.0], [7.0, 10.0, 20.0]),
            measured("fast", [2.0, 5.0, 4.0], [1.0, 4.0, 2.0], page_lock_seconds=0.2),
        ]
    )
    assert deepspeed["seconds"] == [8.0, 10.0, 20.0]
    assert fast["seconds"] == [2.0, 5.0, 4.0]
    assert fast["figures"] == {
        "median_seconds": 4.0,
        "spread_percent": pytest.approx(37.5),  # quartiles 3.0 and 4.5
        "gigabytes_per_second": 0.5,
        "share_of_link": 0.25,  # of 1/2, 1/5 and 1/4
        "times_deepspeed": 4.0,  # of 4, 2 and 5
        "page_lock_seconds_per_gib": pytest.approx(0.05),
    }
    assert link["figures"]["share_of_link"] == 1
    assert link["figures"]["times_deepspeed"] == 10
    assert deepspeed["figures"]["page_lock_seconds_per_gib"] is None


def a_report(accelerator, elements, not_run=()):
    """Of the link alone, at these sizes."""
    one = {
        "variant": "pinned low-precision copy",
        "kind": "baseline",
        "from_file": False,
        "dtype": "bfloat16",
        "summary": "a summary",
        "right_bits": True,
        "seconds_by_rank": [[0.001, 0.002]],
        "source_bytes": 4000,
        "destination_bytes": 2000,
        "pinned_bytes": 2**20,
        "page_locked_bytes": 0,
        "device_bytes": 0,
        "page_lock_seconds": None,
    }
    hardware = {"accelerator": accelerator, "device": "a device", "cpu": "a CPU", "cores": 2, "threads": 1}
    return {
        "hardware": {**hardware, "torch": "t", "deepspeed": "d", "date": "2026-01-01"},
        "ranks": 1,
        "rounds": 2,
        "nvme": None,
        "measurements": list(copy_report.with_figures([{**one, "elements": size} for size in elements])),
        "not_run": list(not_run),
    }


@pytest.mark.parametrize(
    ("accelerator", "first"),
    [
        ("simulated", "The accelerator is simulated: this tests bits, not speed."),
        ("cpu", "There is no accelerator here: copies stay in host memory, and no figure is of a device."),
        ("cuda", "a device; a CPU, 2 cores; 1 rank with 1 host thread; torch t, DeepSpeed d; 2026-01-01"),
    ],
)
def test_it_says_first_what_figures_are_worth(capsys, accelerator, first):
    copy_report.show(a_report(accelerator, [1000]))
    assert capsys.readouterr().out.splitlines()[0] == first


def test_a_reason_is_told_once_and_with_its_sizes_where_it_is_not_for_all(capsys):
    entries = [
        {"dtype": "bfloat16", "elements": size, "variant": name, "reason": "no"}
        for name, sizes in (("everywhere", (2**20, 1000)), ("somewhere", (2**20,)))
        for size in sizes
    ]
    copy_report.show(a_report("cuda", [1000, 2**20], entries))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not run")]
    assert lines == ["not run: everywhere: no", "not run: somewhere: no (2^20 elements)"]


def test_wide_tables_have_every_column_in_one_line(capsys):
    report = a_report("cuda", [1000])
    copy_report.show(report)
    narrow = capsys.readouterr().out
    copy_report.show(report, wide=True)
    wide = capsys.readouterr().out

    def of(text):
        return [line.split() for line in text.splitlines() if line.startswith("pinned low-precision copy  ")][:-1]

    first, second = of(narrow)
    (whole,) = of(wide)
    assert whole == [*first, *second[3:]]


def test_names_are_whole_in_a_narrow_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name, value in (("TERM", "dumb"), ("COLUMNS", "40"), ("LINES", "20")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    copy_report.show(a_report("cuda", [1000]))
    assert "pinned low-precision copy  " in terminal.getvalue()
    assert "\u2026" not in terminal.getvalue()


@pytest.mark.slow
def test_a_plot_is_a_picture(capsys, tmp_path):
    path = tmp_path / "rates.png"
    assert (
        cli.main(["bench", *SMALL, "--elements", "1000", "5000", "--strategies", "pageable", "--plot", str(path)]) == 0
    )
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_that_cannot_be_made_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    def refused(path):
        with pytest.raises(SystemExit) as caught:
            cli.main(["bench", *SMALL, "--plot", str(path)])
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "ends in .png, .svg, .pdf" in refused(tmp_path / "rates.txt")
    assert "there is no directory" in refused(tmp_path / "nowhere" / "rates.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "host-to-device-transfer[plot]" in refused(tmp_path / "rates.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--element", "5", "--bogus"], "unrecognized arguments: --bogus"),
        (["--elements", "2^"], "expected a whole number from 1"),
        (["--rounds", "0"], "expected a whole number from 1"),
        (["--dtypes", "int8"], "expected one of bfloat16"),
        (["--strategies", "pinned_stage"], "pinned_staged"),
        (["--accelerator", "simulate"], "simulated"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_arguments_end_with_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *arguments])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_configuration_gives_strategies_their_sections(capsys, tmp_path):
    path = tmp_path / "transfer.yaml"
    path.write_text("transfer: {pinned_staged: {chunk_elements: 1000, buffers: 3}}")
    _, report = report_of(capsys, *SMALL, "--strategies", "pinned_staged", "--config", str(path))
    assert [one["pinned_bytes"] for one in report["measurements"] if one["variant"] == "pinned_staged"] == [6000]


def test_an_accelerator_that_is_not_here_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(get_accelerator("simulated"), "unavailable_reason", lambda: "It is at the repair shop.")
    assert cli.main(["bench", *SMALL, "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "It is at the repair shop." in printed.err


def test_numbers_as_people_write_them():
    assert [count(text) for text in ("7", "2^28", "2**10", "1e9", "1_000", "16Mi")] == [
        7,
        2**28,
        1024,
        10**9,
        1000,
        2**24,
    ]
    for text in ("0", "-1", "1.5", "2^-1", "2^2^2", "many", "", "nan", "inf", "10^99", "2^63", "010", "1:30", "16M"):
        with pytest.raises(argparse.ArgumentTypeError):
            count(text)
    assert [format_count(number) for number in (1000, 2**9, 2**28, 2**28 + 1)] == [
        "1,000",
        "512",
        "2^28",
        "268,435,457",
    ]
    assert dtype_name("fp16") == "float16"


def test_bits_are_compared_and_not_values():
    assert not bits.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert bits.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not bits.same_bits(torch.zeros(3), torch.zeros(2))
    values = torch.arange(10.0)
    assert bits.same_bits(values.bfloat16(), values, chunk_elements=3)
    changed = values.bfloat16()
    changed[9] = 9.0625
    assert not bits.same_bits(changed, values, chunk_elements=3)


@pytest.mark.parametrize("elements", [1, 7, 1000])
def test_values_to_copy_hold_edges_but_nothing_like_the_poison(elements):
    values = bits.source_values(elements)
    assert values.shape == (elements,)
    assert not values.isnan().any()
    if elements == 1000:
        for end in (values[:20], values[-20:]):
            assert end.isinf().any()
            assert ((end != 0) & (end.abs() < 2**-126)).any(), "an fp32 subnormal"
    destination = values.half()
    bits.poison(destination)
    assert destination.isnan().all()
