"""What people read is true: code in it runs, messages, options and paths in it exist."""

import ast
import json
import re
import shlex
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import transfer.cli
from tests.running import run_python
from transfer import ConfigError, TransferConfig, When, load_config
from transfer.config_file import resolve_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
#: A fenced block, with the comment before it. Sphinx's directives have names in braces.
BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
BLOCKS = [
    SimpleNamespace(page=name, **block.groupdict())
    for name, text in TEXTS.items()
    for block in BLOCK.finditer(text)
    if not block["language"].startswith("{")
]


def runs(language):
    """The blocks of a language that say nothing of not being run."""
    return [block for block in BLOCKS if block.language == language and block.comment is None]


def test_every_block_is_run_or_says_why_not():
    assert len(BLOCKS) > 30
    for block in BLOCKS:
        if block.comment is None:
            assert block.language in {"python", "sh", "yaml", "json", "toml", "text"}, block
        elif block.comment not in {"ci", "ci-tests"}:  # which `.ci/run` runs
            assert re.fullmatch(r"not run: .{10,}", block.comment), block


@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in runs("python")))
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path):
    code = "\n".join(block.code for block in runs("python") if block.page == page)
    done = run_python("-c", code, forked=True, cwd=tmp_path, tear_down=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in re.findall(r"^print\(.*\)\n# (.*)$", code, re.MULTILINE):
        assert line in done.stdout


def test_the_pages_have_python():
    assert len(runs("python")) >= 6


@pytest.mark.parametrize("block", runs("sh"), ids=lambda block: block.page)
def test_commands_run(block):
    for line in block.code.splitlines():
        command, *arguments = shlex.split(line, comments=True)
        assert command == "h2d"
        done = run_python("-m", "transfer.cli", *arguments, timeout=250)
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("block", runs("yaml"), ids=lambda block: block.page)
def test_configurations_are_right(block, tmp_path):
    path = tmp_path / "transfer.yaml"
    path.write_text(block.code)
    assert load_config(path) != TransferConfig()


@pytest.mark.parametrize("block", runs("json"), ids=lambda block: block.page)
def test_sections_of_deepspeed_configurations_are_right(block):
    assert resolve_config(json.loads(block.code)["host_to_device_transfer"]) != TransferConfig()


@pytest.mark.parametrize("block", runs("toml"), ids=lambda block: block.page)
def test_entry_points_are_those_of_the_example(block):
    assert block.code in (ROOT / "examples" / "acme_accelerator" / "pyproject.toml").read_text()


def test_the_error_message_of_a_configuration(tmp_path):
    text = TEXTS["docs/how-to/choose.md"]
    path = tmp_path / "transfer.yaml"
    path.write_text(next(block.code for block in runs("yaml") if block.page == "docs/how-to/choose.md"))
    assert load_config(path).section("pinned_staged").chunk_elements == 2**23
    path.write_text(path.read_text().replace("chunk_elements", "chunk_elemnts"))
    (message,) = re.findall(r"^(transfer\.yaml:\d+: .*)$", text, re.MULTILINE)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{tmp_path}/{message}"


# Messages


def templates():
    """Every text in the source, with a NUL for each placeholder."""
    for path in [*(ROOT / "transfer").rglob("*.py"), *(ROOT / "accelerators").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sd]|\{[a-z]+\}", "\0", node.value)
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


MESSAGES = re.findall(r"^(`+) ?(.*?) ?\1\n: ", TEXTS["docs/reference/troubleshooting.md"], re.MULTILINE)


def test_every_message_of_the_page_is_one_of_the_code():
    assert len(MESSAGES) > 50
    texts = "\n".join(templates())
    for _, message in MESSAGES:
        pattern = "[^\n]*".join(re.escape(part) for part in message.split("..."))
        assert re.search(pattern, texts), message


def test_a_message_that_is_nowhere_is_found_out():
    assert not re.search(re.escape("which is slower; `fallback: no` makes this an error."), "\n".join(templates()))


# Options, paths and links

COMMANDS = [*transfer.cli.COMMANDS, "bench zero3"]


@pytest.fixture(scope="module")
def helps():
    """The help of each command."""
    program = f"""
import contextlib, io, json
from transfer.cli import main
helps = {{}}
for command in {COMMANDS}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    helps[command] = out.getvalue()
print(json.dumps(helps))
"""
    done = run_python("-c", program, forked=True, tear_down=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def uses():
    """Page, command and options of each `h2d ...` in a page."""
    names = "|".join(sorted(COMMANDS, key=len, reverse=True))
    for page, text in TEXTS.items():
        for command, rest in re.findall(rf"\bh2d ({names})\b([^`\n]*)", text):
            words = rest.split("#")[0].split()
            if command == "run":  # what follows the script is its own
                words = words[: next((at for at, word in enumerate(words) if not word.startswith("-")), None)]
            yield page, command, re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(words))


def test_every_command_is_in_the_reference():
    for command in COMMANDS:
        assert f"| `h2d {command}" in TEXTS["docs/reference/command.md"], command


def test_options_are_those_of_the_commands(helps):
    assert sum(len(options) for *_, options in uses()) > 15
    for page, command, options in uses():
        for option in options:
            assert re.search(rf"{option}\b(?!-)", helps[command]), f"{page}: h2d {command} {option}"


def test_paths_in_the_pages_are_there():
    found = [
        (page, path)
        for page, text in TEXTS.items()
        for path in re.findall(r"`((?:transfer|accelerators|tests|examples|docs|\.github|\.ci)/[\w./*-]+)`", text)
    ]
    assert len(found) > 10
    for page, path in found:
        assert list(ROOT.glob(path.rstrip("/"))), f"{page}: {path}"


@pytest.mark.parametrize("page", ["README.md", ".github/CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    """Sphinx checks those of docs/."""
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", text)
    assert len(targets) > 10
    for target, _ in targets:
        assert ((ROOT / page).parent / target).exists(), target


def test_the_front_page_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_the_figures_of_peers_are_those_of_the_record():
    record = json.loads((ROOT / "examples" / "figures" / "peers_h200.json").read_text())
    rows = {
        "deepspeed": "| DeepSpeed |",
        "default": "| **DeepSpeed with this package** |",
        "offload_param": "| DeepSpeed, `offload_param` too |",
        "offload_param, default": "| the same with this package |",
        "fsdp2": "| torch's FSDP2, `CPUOffloadPolicy` |",
        "superoffload": "| DeepSpeed's SuperOffload |",
    }
    assert {peer["variant"] for peer in record["peers"]} == set(rows)
    for peer in record["peers"]:
        # The first table of the page.
        row = next(
            line
            for line in TEXTS["docs/explanation/measurements.md"].splitlines()
            if line.startswith(rows[peer["variant"]])
        )
        cells = [cell.strip(" *") for cell in row.split("|")]
        for place, phase in enumerate(("forward", "backward", "step", "iteration"), start=2):
            assert cells[place] == f"{statistics.median(peer[f'{phase}_seconds']):.3f}", (row, phase)
    default, deepspeed = (next(p for p in record["peers"] if p["variant"] == name) for name in ("default", "deepspeed"))
    for peer in (default, deepspeed):
        for phase in ("step", "iteration"):
            assert f"{statistics.median(peer[f'{phase}_seconds']):.3f} s" in TEXTS["README.md"]


# What Sphinx is given


@pytest.fixture
def docs_modules(monkeypatch):
    """The modules of docs/ can be imported."""
    for folder in ("extensions", "pictures"):
        monkeypatch.syspath_prepend(ROOT / "docs" / folder)
    before = set(sys.modules)
    yield
    for name in {"config_tables", "site_tables", "trace_step", "drawing"} - before:
        sys.modules.pop(name, None)


def test_every_key_is_in_a_table_with_its_default_and_what_it_does(docs_modules):
    import config_tables

    rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in config_tables.markdown() if line.startswith("| `")
    ]
    keys = {row[0].strip("`") for row in rows}
    for name, model in TransferConfig.sections().items():
        assert {f"{name}.{field}" for field in model.model_fields} <= keys
    assert {*TransferConfig.model_fields, *(f"rules[].when.{field}" for field in When.model_fields)} <= keys
    assert all(len(row) == 4 and len(row[3]) > 10 for row in rows)
    (chunk,) = (row for row in rows if row[0] == "`pinned_staged.chunk_elements`")
    assert chunk[2] == "`16777216` (2^24)"


@pytest.mark.parametrize(
    ("strategy", "field"),
    [("pinned_staged", "chunk_elements"), ("pinned_staged", "buffers"), ("nvme_swapped", "threads")],
)
def test_the_bounds_in_the_tables_are_those_that_are_checked(docs_modules, strategy, field):
    import config_tables

    (row,) = (line for line in config_tables.markdown() if line.startswith(f"| `{strategy}.{field}` "))
    largest = eval(re.search(r", 1 to ([\d^]+) \|", row).group(1).replace("^", "**"))
    assert getattr(resolve_config({strategy: {field: largest}}).section(strategy), field) == largest
    for outside in (0, largest + 1):
        with pytest.raises(ConfigError):
            resolve_config({strategy: {field: outside}})


def test_every_copy_of_the_code_is_listed_under_its_answer(docs_modules):
    import site_tables

    from transfer.zero3.stage3.sites import COPY_SITES

    sections = {}
    for section in "\n".join(site_tables.markdown()).split("## ")[1:]:
        heading, _, sections[heading] = section.partition("\n")
    answers = dict(zip(sections, ("served", "left alone", "impossible"), strict=True))
    assert sum(section.count("*Where:*") for section in sections.values()) == len(COPY_SITES)
    for site in COPY_SITES:
        (text,) = (text for heading, text in sections.items() if f"**{site.name}**\n" in text)
        assert answers[next(heading for heading in sections if sections[heading] == text)] == site.answer
        assert site.reason in text


def test_the_lanes_of_a_trace(docs_modules):
    """Microseconds: long casts without the driver's calls and the updates; kernels of a copy are the link's."""
    import trace_step

    def event(name, kind, begin, end):
        return {"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": end - begin}

    lanes = trace_step.lanes_of(
        [
            event("iteration", "user_annotation", 1000, 9000),
            event("cpu_adam", "user_annotation", 2000, 3000),
            event("aten::copy_", "cpu_op", 3000, 6000),
            event("aten::_to_copy", "cpu_op", 3000, 4000),
            event("aten::mm", "cpu_op", 6000, 7000),
            event("aten::mul_", "cpu_op", 7500, 7600),
            event("cudaMemcpyAsync", "cuda_runtime", 4000, 6000),
            event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 4500, 5900),
            event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 6500, 6900),
            event("h2d/pinned_direct", "gpu_user_annotation", 7000, 8000),
            event("copy_kernel", "kernel", 7000, 8000),
            event("gemm", "kernel", 1100, 1200),
            event("gemm", "kernel", 1230, 1500),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert lanes == {
        "adam": [[1.0, 1.0]],
        "cast": [[2.0, 1.0]],
        "link": [[3.5, 1.4], [6.0, 1.0]],
        "device": [[0.1, 0.4]],
    }
