"""``h2d trace``: traces made by hand in the format that torch's profiler writes, and figures worked out by hand."""

import gzip
import json
import sys
import textwrap
import tracemalloc

import pytest

from tests.running import run_python
from transfer import cli
from transfer.cli.trace import reading
from transfer.cli.trace.figures import TYPICAL_LINK, figures
from transfer.cli.trace.gathering import gather
from transfer.cli.trace.intervals import Intervals

MIB = 2**20
THREAD = {"pid": 10, "tid": 10}
PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"


def event(category, name, start, duration, place=THREAD, **arguments):
    return {"ph": "X", "cat": category, "name": name, **place, "ts": start, "dur": duration, "args": arguments}


def stream(number):
    return {"pid": 0, "tid": number}


def memcpy(name, start, duration, number=7, **arguments):
    return event("gpu_memcpy", name, start, duration, stream(number), **arguments)


def step(number, start, duration):
    return event("user_annotation", f"ProfilerStep#{number}", start, duration)


#: Two steps of a second, in each of which a master of 512 MiB in 16 bits leaves from pageable memory.
SLOW = [
    {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "args": {"name": "python"}},
    step(5, 0, 1_000_000),
    step(6, 1_000_000, 1_000_000),
    event("gpu_user_annotation", "ProfilerStep#5", 20, 990_000, stream(7)),
    # The first copy: `copy_` casts, then another `copy_` in it copies, for which the runtime holds the host.
    event("cpu_op", "aten::copy_", 50_000, 140_000),
    event("cpu_op", "aten::copy_", 90_000, 95_000),
    event("cuda_runtime", "cudaMemcpyAsync", 95_000, 90_000, correlation=1),
    memcpy(PAGEABLE, 100_000, 80_000, bytes=512 * MIB, stream=7),
    event("kernel", "gemm", 120_000, 20_000, stream(20)),
    event("kernel", "gemm", 130_000, 5_000, stream(21)),
    # The second: slower, and the host is free again before it has ended.
    event("cpu_op", "aten::copy_", 1_050_000, 200_000),
    event("cuda_runtime", "cudaMemcpyAsync", 1_090_000, 70_000, correlation=2),
    memcpy(PAGEABLE, 1_100_000, 120_000, bytes=512 * MIB),
    # A batch, a pinned copy, and what is none of a step, or not from the host.
    memcpy(PAGEABLE, 10_000, 5, bytes=1000),
    memcpy(PINNED, 300_000, 200, bytes=8 * MIB),
    memcpy(PAGEABLE, 3_000_000, 5, bytes=2 * MIB),
    memcpy("Memcpy DtoH (Device -> Pinned)", 400_000, 500, bytes=MIB),
    event("cuda_runtime", "cudaStreamWaitEvent", 1_160_000, 50_000),
    event("cuda_runtime", "cudaStreamSynchronize", 1_100_000, 100_000, {"pid": 10, "tid": 11}),
]


def write(path, events=SLOW, **beside):
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}], **beside, "traceEvents": events}))
    return path


def trace(capsys, *arguments):
    status = cli.main(["trace", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_copies_of_a_step_are_those_counted_by_hand(tmp_path, capsys):
    status, out, _ = trace(capsys, write(tmp_path / "trace.json"), "--json")
    assert status == 0
    report = json.loads(out)
    assert (report["schema_version"], report["command"], report["file"]) == (1, "trace", "trace.json")
    assert (report["events"], report["steps"], report["step_seconds"]) == (len(SLOW), 2, 1.0)
    assert report["copies_outside_steps"] == 1
    groups = {one.pop("group"): one for one in report["groups"]}
    assert list(groups) == ["pageable, small", "pageable", "pinned"]
    assert groups["pageable"] == {
        "copies": 1.0,
        "bytes": 512 * MIB,
        "seconds": pytest.approx((0.08 + 0.12) / 2),
        "bytes_per_second": pytest.approx(2**30 / 0.2),
        "host_seconds": pytest.approx((0.14 + 0.2) / 2),
        "under_kernels": pytest.approx(20 / 200),
        # All of the first copy is held, and 60 of 120 ms of the second, on the thread that marks the steps.
        "host_free": pytest.approx(60 / 200),
    }
    assert groups["pageable, small"]["bytes"] == 500
    assert groups["pinned"]["bytes_per_second"] == pytest.approx(8 * MIB / 200e-6)
    assert report["sizes"] == [{"bytes": 512 * MIB, "copies": 1.0}]
    assert report["link"]["bytes_per_second"] == pytest.approx(8 * MIB / 200e-6)
    assert report["would"] == {
        "now_seconds": pytest.approx(0.17),
        "cast_is_seen": True,
        "pinned_staged_seconds": pytest.approx(64 * 200e-6),
        "pinned_direct_seconds": pytest.approx(128 * 200e-6),
        "behind_cpu_adam_seconds": 0.0,
    }
    assert "take 17% of the time" in report["verdict"]


def test_the_order_of_events_does_not_matter():
    assert figures(gather(SLOW)) == figures(gather(reversed(SLOW)))


def test_a_trace_without_steps_is_taken_as_a_whole():
    found = figures(gather(each for each in SLOW if "ProfilerStep" not in each["name"]))
    assert (found["steps"], found["copies_outside_steps"]) == (0, 0)
    assert found["step_seconds"] == pytest.approx((3_000_005 - 10_000) / 1e6)
    (large,) = [one for one in found["groups"] if one["group"] == "pageable"]
    assert (large["copies"], large["bytes"]) == (3, 1026 * MIB)


def test_what_this_package_has_made_is_recognised(capsys, tmp_path):
    ours = [
        step(0, 0, 1_000_000),
        event("user_annotation", "h2d/pinned_direct", 100_000, 50),
        event("user_annotation", "h2d/pinned_direct", 200_000, 150),
        event("gpu_user_annotation", "h2d/pinned_direct", 110_000, 40_000, stream(9)),
        event("gpu_user_annotation", "h2d/pinned_direct", 210_000, 60_000, stream(9)),
        # The strategy's own kernel, which reads mapped memory, is no work that hides it.
        event("kernel", "cast", 110_000, 40_000, stream(9)),
        event("kernel", "cast", 210_000, 60_000, stream(9)),
        event("kernel", "gemm", 240_000, 50_000, stream(7)),
        event("cuda_runtime", "cudaDeviceSynchronize", 250_000, 100_000),
    ]
    (ranges,) = figures(gather(ours))["ranges"]
    assert ranges == {
        "strategy": "pinned_direct",
        "copies": 2.0,
        "submit_seconds": pytest.approx(200e-6),
        "device_seconds": pytest.approx(0.1),
        "under_kernels": pytest.approx(30 / 100),
        "host_free": pytest.approx(80 / 100),
    }
    status, out, _ = trace(capsys, write(tmp_path / "trace.json", ours))
    assert status == 0
    assert "This package has made copies (pinned_direct)" in out


@pytest.mark.parametrize("name", ["Memcpy HtoD (Host -> Device)", "Memcpy M2D", "CopyHostToDevice"])
def test_where_the_profiler_does_not_tell_the_memory_neither_does_this(name, tmp_path, capsys):
    found = figures(gather([step(0, 0, 100), memcpy(name, 10, 20, bytes=MIB)]))
    assert [one["group"] for one in found["groups"]] == ["not told"]
    assert found["would"] is None
    assert found["link"]["bytes_per_second"] == TYPICAL_LINK
    status, out, _ = trace(capsys, write(tmp_path / "t.json", [step(0, 0, 100), memcpy(name, 10, 20, bytes=MIB)]))
    assert status == 0
    assert "does not say what memory" in " ".join(out.split())


def test_rocm_has_sizes_in_the_runtime_s_calls():
    call = event("cuda_runtime", "hipMemcpyWithStream", 8, 30, size=str(4 * MIB), correlation=117, kind="1")
    copy = memcpy("Memcpy HtoD (Host -> Device)", 10, 20, correlation=117, kind="HtoD")
    other = memcpy("Memcpy HtoD (Host -> Device)", 50, 20, correlation=118, kind="HtoD")
    assert [each.bytes for each in gather([copy, other, call]).copies] == [4 * MIB, None]


def test_older_traces(tmp_path):
    """Of torch 1.8: other names of categories, streams in words, times in strings, no bytes."""
    old = [
        {"ph": "X", "cat": "Operator", "name": "ProfilerStep#1", "pid": 1, "tid": "123", "ts": "50", "dur": "400"},
        event("Memcpy", PAGEABLE, 405, 10, {"pid": 0, "tid": "stream 7"}, stream=7),
        event("Runtime", "cudaMemcpyAsync", 400, 20, {"pid": 1, "tid": "123"}),
        event("Kernel", "gemm", 410, 20, {"pid": 0, "tid": "stream 20"}),
    ]
    found = figures(gather(old))
    (group,) = found["groups"]
    assert (group["group"], group["copies"], group["bytes"]) == ("pageable", 1, None)
    assert group["under_kernels"] == pytest.approx(0.5)
    assert group["host_free"] == pytest.approx(0.0)
    assert found["would"] is None, "without bytes nothing is computed"


def test_a_link_that_is_given_wins():
    found = figures(gather(SLOW), link=1e9)
    assert found["link"] == {"bytes_per_second": 1e9, "source": "as given"}
    assert found["would"]["pinned_staged_seconds"] == pytest.approx(0.536870912)


@pytest.mark.parametrize("read_bytes", [1, 7, 1000])
@pytest.mark.parametrize("indent", [None, 1])
def test_events_are_read_whole_wherever_a_read_ends(tmp_path, monkeypatch, read_bytes, indent):
    monkeypatch.setattr(reading, "_READ_BYTES", read_bytes)
    events = [event("cpu_op", 'größer "]}, {', 1, 2), *SLOW[:3], {"ph": "i", "args": {"traceEvents": [1]}}]
    text = json.dumps(
        {"a": [1, {"b": "]"}], "traceEvents": events, "traceName": "x"}, indent=indent, ensure_ascii=False
    )
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    assert list(reading.events(str(path))) == events
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert list(reading.events(str(packed))) == events
    path.write_text(json.dumps(events, indent=indent)[:-1])  # a bare list may lack its end
    assert list(reading.events(str(path))) == events


def test_large_files_take_little_memory(tmp_path):
    path, one = tmp_path / "trace.json", json.dumps(event("cpu_op", "x" * 1000, 1, 2))
    with path.open("w") as file:
        file.write('{"traceEvents": [' + one)
        for _ in range(20_000):
            file.write("," + one)
        file.write("]}")
    assert path.stat().st_size > 20e6
    tracemalloc.start()
    facts = gather(reading.events(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6
    assert facts.last == 3


def test_many_intervals_are_merged_as_they_come():
    many, few = Intervals((index, index + 1) for index in range(50)), Intervals()
    for index in range(250_000):
        few.add(index % 1000, index % 1000 + 1)
    assert many.parts() == [(0, 50)]
    assert few.length() == 1000
    assert sys.getsizeof(few.parts()) < 1000


def test_intervals():
    some = Intervals([(5, 7), (1, 3), (2, 4), (9, 9)])
    assert some.parts() == [(1, 4), (5, 7)]
    assert some.within(3, 6) == 2
    assert some.within(4, 5) == 0
    assert some.without(Intervals([(0, 2), (3, 6)])).parts() == [(2, 3), (6, 7)]
    assert some.without(Intervals()).parts() == some.parts()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"", "no trace of a profiler"),
        (b'{"other": []}', "no trace of a profiler"),
        (b'{"traceEvents": [{"ph": "X", "na', "ends in the middle"),
        (b'{"traceEvents": [{"ph": }]}', "is no JSON"),
        (b"\x1f\x8b" + b"broken", "cannot be read"),
        (gzip.compress(b'{"traceEvents": []}')[:-4], "cannot be read"),
        (b"\xff\xfe\x00", "is no text"),
        (b'{"traceEvents": []}', "has no events"),
        (json.dumps({"traceEvents": [step(0, 0, 1)]}).encode(), "1 events and none of a device"),
    ],
    ids=[
        *("none", "empty", "other", "cut", "broken", "not packed", "packed and cut", "binary", "no events", "no device")
    ],
)
def test_a_file_without_an_answer_says_why(tmp_path, capsys, content, said):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    status, out, err = trace(capsys, path)
    assert (status, out) == (1, "")
    assert err.startswith("h2d trace: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_wrong_arguments(capsys):
    for arguments in ([], ["x.json", "--link", "fast"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["trace", *arguments])
        assert ended.value.code == 2


def test_tables_fit_into_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transfer.cli.measuring.report._UNKNOWN_WIDTH", 80)
    status, out, _ = trace(capsys, write(tmp_path / "trace.json"))
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "1 of 512 MiB" in out


def test_a_trace_that_torch_has_written(tmp_path):
    """The format is torch's own: steps and ranges are found in what it exports here."""
    program = """
    import sys, torch
    from accelerators.simulated import SimulatedAccelerator
    from transfer import build_transfer
    simulated = SimulatedAccelerator()
    destination, source = simulated.device_empty(2**19, dtype=torch.bfloat16), torch.ones(2**19)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with build_transfer({"strategy": "pinned_staged"}, simulated) as transfer:
        ready = lambda profiler: profiler.export_chrome_trace(sys.argv[1])
        with torch.profiler.profile(activities=cpu, schedule=schedule, on_trace_ready=ready) as profiler:
            for _ in range(3):
                transfer.copy(destination, source)
                profiler.step()
    """
    path = tmp_path / "trace.json.gz"
    done = run_python("-c", textwrap.dedent(program), path, forked=True)
    assert done.returncode == 0, done.stderr
    facts = gather(reading.events(str(path)))
    assert [name for name, _, _ in sorted(facts.steps)] == ["ProfilerStep#1", "ProfilerStep#2"]
    (ranges,) = figures(facts)["ranges"]
    assert (ranges["strategy"], ranges["copies"], ranges["device_seconds"]) == ("pinned_staged", 1.0, None)
