"""Every example runs as its own text says, and the README's Python works."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.running import run_python
from transfer import ConfigError, TransferConfig, load_config
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
    for name in ("fallback", "completion", "verify"):
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


README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_the_readmes_python_runs_and_prints_what_it_says(number):
    done = run_python("-c", PYTHON[number], forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in re.findall(r"^print\(.*\)\n# (.*)$", PYTHON[number], re.MULTILINE):
        assert line in done.stdout


def test_the_readme_has_the_python_it_had():
    assert len(PYTHON) == 6


def test_the_readmes_configuration_and_error_message(tmp_path):
    path = tmp_path / "transfer.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", README, re.DOTALL).group(1))
    assert load_config(path).section("pinned_staged").chunk_elements == 2**23
    path.write_text(path.read_text().replace("chunk_elements", "chunk_elemnts"))
    message = re.search(r"^    (transfer\.yaml:\d+: .*)$", README, re.MULTILINE).group(1)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{tmp_path}/{message}"
