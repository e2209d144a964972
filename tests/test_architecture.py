"""Who may know whom, what is public, and that every public name says what it does."""

import ast
import inspect
from pathlib import Path

import pytest

import accelerators
import transfer
from accelerators.protocol import REQUIRED_MEMBERS

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("accelerators", "transfer") for path in (ROOT / package).rglob("*.py"))
RUNTIMES = {"cuda", "xpu", "npu", "hpu", "mps", "mlu", "sdaa", "supa", "accelerator"}


def imports(path):
    """Every module a file imports, with relative ones made absolute, and whether it is at the top."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])]), id(node) in top


def names(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_the_arrows(path):
    name = names(path)
    for module, at_top in imports(path):
        root = module.split(".")[0]
        if name.startswith("accelerators/"):
            assert root != "transfer", "accelerators know nothing of transfer"
        if root == "deepspeed":
            assert name.startswith(("accelerators/", "transfer/zero3/", "transfer/cli/bench_zero3/"))
            # This one defines a subclass of DeepSpeed's, and is itself imported lazily.
            assert not at_top or name == "accelerators/simulated/deepspeed.py", "deepspeed is imported lazily"
        if name.startswith("transfer/") and not name.startswith(("transfer/zero3", "transfer/cli/")):
            assert not module.startswith("transfer.cli"), "only users know the command"
            assert not module.startswith("transfer.zero3"), "only users know ZeRO-3"
        if name.startswith("transfer/zero3/"):
            assert "strategies" not in module
            assert module not in {"accelerators", "torch", "accelerators.registry", "accelerators.simulated"}
        if name.startswith("transfer/strategies/"):
            assert not module.startswith(("transfer.policy", "transfer.routing", "transfer.config_file"))


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[-2] != "accelerators"], ids=names)
def test_no_runtime_is_named_outside_accelerators(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in RUNTIMES


def test_zero3_asks_only_the_interface():
    """It names no method of an accelerator, no stream, no event, no buffer."""
    used = {
        node.attr
        for node in ast.walk(ast.parse((ROOT / "transfer/zero3/engines.py").read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert not used & {
        "accelerator",
        "current_stream",
        "Stream",
        "Event",
        "pin_empty",
        "is_pinned",
        "unpin_memory",
        "on_host",
    }


@pytest.mark.parametrize("package", [accelerators, transfer])
def test_what_is_public_is_listed_and_documented(package):
    public = {name for name, value in vars(package).items() if not name.startswith("_") and not inspect.ismodule(value)}
    public -= {"annotations"}
    assert sorted(public) == sorted(package.__all__)
    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert inspect.getdoc(getattr(package, name)), f"{package.__name__}.{name} has no docstring"


def test_what_is_checked_of_an_accelerator_is_the_whole_protocol():
    members = {name for name in vars(accelerators.Accelerator) if not name.startswith("_")}
    members |= set(accelerators.Accelerator.__annotations__)
    assert set(REQUIRED_MEMBERS) == members


@pytest.mark.parametrize("module", ["accelerators.errors", "transfer.errors"])
def test_the_tree_of_errors_in_the_docstring_is_complete(module):
    import importlib

    errors = importlib.import_module(module)
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception | Warning) and value.__module__ == module:
            assert name in errors.__doc__, f"{name} is missing in the tree"


def test_files_stay_short():
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 300, f"{names(path)} has become long; split it"


def test_the_top_level_is_what_the_owner_fixed():
    allowed = {
        "transfer",
        "accelerators",
        "tests",
        "examples",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
    }
    here = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert here - {"build", "dist"} <= allowed
