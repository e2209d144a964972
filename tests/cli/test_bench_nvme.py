"""``h2d bench --nvme``: rows for values in a file, what bounds them, and what DeepSpeed does with such a file."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from accelerators import deepspeed_aio, get_accelerator
from tests.cli import strategies
from transfer import NvmeSwappedConfig, cli, register_strategy, unregister_strategy
from transfer.cli.bench_copy import file_baselines as nvme_baselines
from transfer.cli.bench_copy import report as copy_report
from transfer.cli.bench_copy import variants as copy_variants
from transfer.cli.bench_copy.plot import plot
from transfer.cli.bench_copy.report import with_figures
from transfer.cli.measuring import baselines
from transfer.nvme import open_file, swap_out
from transfer.nvme.mounts import file_system, is_local

SMALL = ("--accelerator", "simulated", "--elements", "5000", "--rounds", "2")
FILE_ROWS = [
    "raw read, 12 threads",
    "nvme_swapped",
    "nvme_swapped, cast on the host",
    "nvme_swapped, no checksums",
]
AIO_ROWS = [
    "raw read, DeepSpeed aio",
    "DeepSpeed from NVMe",
    "DeepSpeed swap buffer",
    "swap buffer, pinned_direct",
]
needs_aio = pytest.mark.skipif(
    "H2D_TEST_AIO" not in os.environ, reason="DeepSpeed's aio op takes minutes to build; H2D_TEST_AIO=1 asks for it."
)


@pytest.fixture(autouse=True)
def small_ring(monkeypatch):
    """The ring as first proposed fills 256 MiB for each size, which one test of test_bench.py does."""
    monkeypatch.setitem(baselines.RING_CONFIG, "chunk_elements", 1000)


@pytest.fixture
def no_aio(monkeypatch):
    monkeypatch.setattr(deepspeed_aio, "unavailable_reason", lambda: "The op is on holiday.")


def report_of(capsys, *arguments):
    status = cli.main(["bench", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_file_is_read_in_every_way(capsys, tmp_path, no_aio):
    status, report = report_of(capsys, *SMALL, "--nvme", str(tmp_path), "--elements", "5000", "2^16")
    assert status == 0
    assert report["nvme"] == {
        "file_system": file_system(tmp_path),
        "threads": 12,
        "request_bytes": NvmeSwappedConfig().request_bytes,
    }
    for elements in (5000, 2**16):
        rows = {one["variant"]: one for one in report["measurements"] if one["elements"] == elements}
        assert [name for name, one in rows.items() if one["from_file"]] == FILE_ROWS
        assert {"link", "deepspeed", "pageable", "pinned_direct"} <= set(rows)
        for name, one in rows.items():
            assert one["right_bits"] is (None if name.startswith("raw read") else True)
            assert len(one["seconds"]) == 2
            assert ("share_of_raw_read" in one["figures"]) == one["from_file"]
        assert rows["nvme_swapped"]["source_bytes"] == 4 * elements
        assert rows["raw read, 12 threads"]["figures"]["share_of_raw_read"] == 1
        assert rows["nvme_swapped"]["figures"]["times_deepspeed_from_nvme"] is None
    refused = {(entry["variant"], entry["reason"]) for entry in report["not_run"] if entry["elements"] == 5000}
    assert {name for name, _ in refused} == set(AIO_ROWS)
    assert all("The op is on holiday." in reason for _, reason in refused)
    assert not list(tmp_path.rglob("*.swap"))
    assert get_accelerator("simulated").pinned_bytes == 0


def test_it_says_what_was_measured_on(capsys, tmp_path, no_aio):
    assert cli.main(["bench", *SMALL, "--nvme", str(tmp_path), "--strategies", "nvme_swapped"]) == 0
    out = capsys.readouterr().out
    assert f"Files on {file_system(tmp_path)}" in out
    assert "raw read, 12 threads" in out
    assert "not run: DeepSpeed from NVMe: The op is on holiday." in out
    tables = out[out.index("5,000 elements") : out.index("not run")]
    assert max(map(len, tables.splitlines())) <= 80
    assert tables.count("nvme_swapped, cast on the host") == 3
    nvme = {"file_system": "tmpfs", "threads": 8, "request_bytes": 2**21}
    assert "which is memory: no drive" in copy_report.files_line(nvme)


@needs_aio
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_deepspeeds_own_ways_with_a_file(capsys, tmp_path, threads):
    config = tmp_path / "transfer.yaml"
    config.write_text(f"transfer: {{nvme_swapped: {{threads: {threads}}}}}")
    status, report = report_of(
        capsys, *SMALL, "--nvme", str(tmp_path), "--config", str(config), "--elements", "1", "300_001"
    )
    assert status == 0
    assert report["not_run"] == []
    rows = {one["variant"]: one for one in report["measurements"] if one["elements"] == 300_001}
    assert set(AIO_ROWS) <= set(rows)
    for name in AIO_ROWS[1:]:
        assert rows[name]["right_bits"] is True
    assert rows["DeepSpeed swap buffer"]["from_file"] is False
    assert rows["DeepSpeed from NVMe"]["pinned_bytes"] == 1_200_128
    assert rows["nvme_swapped"]["figures"]["times_deepspeed_from_nvme"] > 0
    assert get_accelerator("simulated").pinned_bytes == 0


@needs_aio
def test_the_op_reads_the_whole_file(simulated, tmp_path):
    values = torch.randn(300_001)
    swapped = swap_out(values, tmp_path)
    reader = nvme_baselines.AioRead(simulated, torch.bfloat16, 3)
    reader.prepare(swapped)
    reader.copy(simulated.device_empty(300_001, dtype=torch.bfloat16), swapped)
    assert torch.equal(reader._values(swapped), values)
    reader.close()


def test_memory_that_may_not_be_locked_is_a_reason_and_not_an_abort(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_aio, "unavailable_reason", lambda: None)
    monkeypatch.setattr(deepspeed_aio, "may_lock_bytes", lambda _num_bytes: False)
    _, report = report_of(capsys, *SMALL, "--nvme", str(tmp_path), "--strategies")
    assert {entry["variant"] for entry in report["not_run"]} == set(AIO_ROWS)
    assert {entry["reason"] for entry in report["not_run"]} == {
        "This process may not lock 20480 bytes of memory (`ulimit -l`)."
    }


def test_the_raw_read_reads_the_file(simulated, tmp_path):
    values = torch.randn(300_001)
    swapped = swap_out(values, tmp_path)
    raw = nvme_baselines.RawRead(simulated, torch.bfloat16, 2, 2**18)
    raw.prepare(swapped)
    raw.copy(simulated.device_empty(300_001, dtype=torch.bfloat16), swapped)
    assert torch.equal(raw._memory.view(torch.float32)[:300_001], values)
    raw.close()


def test_strategies_restrict_the_rows(capsys, tmp_path, no_aio):
    def rows(*names):
        _, report = report_of(capsys, *SMALL, "--nvme", str(tmp_path), "--strategies", *names)
        return [one["variant"] for one in report["measurements"] if one["kind"] == "strategy"]

    assert rows("nvme_swapped") == FILE_ROWS[1:]
    assert rows("nvme_swapped, no checksums") == ["nvme_swapped, no checksums"]
    assert rows("pageable") == ["pageable"]


def test_a_strategy_for_files_needs_some(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *SMALL, "--strategies", "nvme_swapped"])
    assert caught.value.code == 2
    assert "nvme_swapped copies values from files: say where with --nvme DIR" in capsys.readouterr().err
    _, report = report_of(capsys, *SMALL)
    assert not [one for one in report["measurements"] if one["from_file"]]
    assert report["nvme"] is None


def test_wrong_bits_from_a_file_fail_the_command(capsys, tmp_path, no_aio):
    class WrongFromFiles(strategies.WrongInOneBit):
        reads_swapped = True

        def _submit(self, destination, source):
            from transfer.nvme import swap_in

            return super()._submit(destination, swap_in(source))

    register_strategy("spoilt", WrongFromFiles)
    try:
        status, report = report_of(capsys, *SMALL, "--nvme", str(tmp_path))
    finally:
        unregister_strategy("spoilt")
    assert status == 1
    assert [one["variant"] for one in report["measurements"] if one["right_bits"] is False] == ["spoilt"]


@pytest.mark.parametrize("refuses", ["open", "preadv"])
def test_the_page_cache_is_never_measured(capsys, tmp_path, monkeypatch, no_aio, refuses):
    real = getattr(os, refuses)

    def refusing(*given):
        if refuses == "preadv" or (given[1] & open_file.O_DIRECT):
            raise OSError(errno.EINVAL, "no direct access here")
        return real(*given)

    monkeypatch.setattr(os, refuses, lambda *given, **how: refusing(*given) if not how else real(*given, **how))
    status, report = report_of(capsys, *SMALL, "--nvme", str(tmp_path))
    assert status == 1
    assert not [one for one in report["measurements"] if one["from_file"]]
    (entry,) = report["not_run"]
    assert entry["variant"] == "everything that reads files"
    assert entry["reason"].startswith(f"The file system at {tmp_path} refuses O_DIRECT")
    assert not list(tmp_path.rglob("*.swap"))


def test_a_directory_that_cannot_be_written_is_a_reason(capsys, no_aio):
    status, report = report_of(capsys, *SMALL, "--nvme", "/proc/nowhere")
    assert status == 1
    assert [entry["variant"] for entry in report["not_run"]] == ["everything that reads files"]
    assert "/proc/nowhere" in report["not_run"][0]["reason"]


def test_ratios_are_against_the_faster_reader():
    def measured(variant, *seconds, from_file=True):
        return {
            "variant": variant,
            "dtype": "bfloat16",
            "elements": 10**9,
            "destination_bytes": 2 * 10**9,
            "source_bytes": 4 * 10**9,
            "from_file": from_file,
            "page_lock_seconds": None,
            "seconds_by_rank": [seconds],
        }

    *_, ours = with_figures(
        [
            measured("link", 1.0, 1.0, 1.0, from_file=False),
            measured("raw read, 8 threads", 1.0, 3.0, 3.0),
            measured("raw read, DeepSpeed aio", 2.0, 2.0, 2.0),
            measured("DeepSpeed from NVMe", 8.0, 12.0, 8.0),
            measured("nvme_swapped", 4.0, 4.0, 4.0),
        ]
    )
    assert ours["figures"]["share_of_raw_read"] == 0.5  # the op has the lower median
    assert ours["figures"]["times_deepspeed_from_nvme"] == 2.0
    assert ours["figures"]["read_gigabytes_per_second"] == 1.0


@pytest.mark.slow
def test_a_plot_shows_files_too(tmp_path):
    one = {"dtype": "bfloat16", "destination_bytes": 100, "figures": {"gigabytes_per_second": 1.0}}
    measurements = [
        {**one, "variant": "link", "from_file": False},
        {**one, "variant": "nvme_swapped", "from_file": True},
    ]
    report = {"nvme": {"file_system": "xfs"}, "hardware": {"accelerator": "cuda"}, "measurements": measurements}
    plot(report, tmp_path / "rates.svg")
    assert b"</svg>" in (tmp_path / "rates.svg").read_bytes()


def test_variants_change_what_their_names_say(simulated, tmp_path):
    from transfer.config import TransferConfig

    source = torch.randn(100)
    names = list(copy_variants.NVME_VARIANTS)
    swapped = swap_out(source, tmp_path)
    variants = copy_variants.file_variants(simulated, torch.bfloat16, source, swapped, TransferConfig(), names)
    configs = {variant.name: variant.transfer.config for variant in variants if variant.kind == "strategy"}
    assert [(one.cast, one.checksums, one.reader) for one in configs.values()] == [
        ("device", True, "posix"),
        ("host", True, "posix"),
        ("device", False, "posix"),
    ]
    for variant in variants:
        variant.transfer.close()


def test_the_file_system_of_a_directory_is_the_deepest_mount(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 9:1 / /mnt/fast rw shared:1 - xfs /dev/nvme0n1 rw\n"
        "3 1 0:9 / /mnt/fast/far rw - nfs4 host:/ rw\n"
    )
    assert file_system("/mnt/fast/models", table) == "xfs"
    assert file_system("/mnt/fast/far", table) == "nfs4"
    assert file_system("/mnt/faster", table) == "ext4"
    assert not is_local("/mnt/fast/far", table)
    assert file_system("/", tmp_path / "missing") is None


def test_mounts_of_any_name(tmp_path):
    """Names that are not ASCII, or not text. A share that is not found would pass for the local drive around it."""
    for name in (
        "données".encode(),
        "重み".encode(),
        b"a b",
        b"nl\nbs\\",
        b"cr\r",
        b"not\xfftext",
        "nbsp\u00a0".encode(),
    ):
        folder = os.fsencode(tmp_path) + b"/" + name
        os.mkdir(folder)  # noqa: PTH102 - bytes
        escaped = folder.replace(b"\\", b"\\134").replace(b" ", b"\\040").replace(b"\n", b"\\012")
        table = tmp_path / "mountinfo"
        table.write_bytes(
            b"1 0 8:1 / / rw - ext4 /dev/sda rw\n"
            b"3 1 0:9 / /mnt/\xfe rw - nfs4 host:/ rw\n"
            b"2 1 0:9 / " + escaped + b" rw - nfs4 host:/ rw\n"
        )
        assert file_system(Path(os.fsdecode(folder)), table) == "nfs4"
        assert not is_local(Path(os.fsdecode(folder)), table)
        assert is_local(tmp_path, table)
