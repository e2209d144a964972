"""Every example runs as its own text says."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.running import run_python
from transfer import TransferConfig, load_config
from transfer.cli.bench_copy import report as copy_report
from transfer.cli.bench_zero3 import report as zero3_report

ROOT = Path(__file__).parents[1]


def run(*arguments, timeout=280):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    done = run_python(*arguments, environment=environment, timeout=timeout, forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_trains_on_two_ranks_through_this_package():
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    out = run(*launch, "examples/train_zero3.py", "--simulate", "--steps", "4")
    first, last, copies = re.search(r"^loss ([\d.]+) -> ([\d.]+) in 4 steps, (\d+) copies$", out, re.MULTILINE).groups()
    assert float(last) < float(first) - 0.5, "it learns"
    assert int(copies) >= 4


def test_the_example_configuration_shows_the_defaults():
    config = load_config(ROOT / "examples" / "transfer.yaml")
    for strategy in ("nvme_swapped", "pinned_direct", "pinned_staged"):
        assert config.section(strategy) == TransferConfig().section(strategy)
    for name in ("fallback", "completion", "verify", "zero3"):
        assert getattr(config, name) == getattr(TransferConfig(), name)
    assert [rule.when.smaller_than for rule in config.rules] == [256 * 1024]


RECORDS = sorted((ROOT / "examples" / "figures").glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_the_readme_is_what_the_command_would_write_and_show_now(path, capsys):
    record = json.loads(path.read_text())
    report = {"bench": copy_report, "bench zero3": zero3_report}[record["command"]]
    assert list(report.with_figures(record["measurements"])) == record["measurements"]
    report.show(record)
    shown = capsys.readouterr().out
    assert all(one["variant"] in shown for one in record["measurements"])


def test_the_records_of_staging_name_their_columns_as_the_reports_do():
    for path in sorted((ROOT / "examples" / "figures").glob("staging_*.csv")):
        assert path.read_text().startswith("variant,round,seconds,"), path


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="Notebooks are executed by nbclient, which the extra `docs` has.")
    pytest.importorskip("ipykernel", reason="Notebooks are executed in ipykernel, which the extra `docs` has.")
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "choosing.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("IPYTHONDIR", str(tmp_path))
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "pinned_staged: The source is not page-locked" in printed
    assert re.search(r"^pinned_direct +[\d.]+ ms, copies \{'pinned_direct': 6\}$", printed, re.MULTILINE)
