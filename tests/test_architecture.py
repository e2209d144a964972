"""Who may know whom, what is public, and that every public name says what it does."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import accelerators
import transfer
from tests.running import run_program

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("accelerators", "transfer") for path in (ROOT / package).rglob("*.py"))
RUNTIMES = {"cuda", "xpu", "npu", "hpu", "mps", "mlu", "sdaa", "supa", "accelerator"}

#: The rooms of ``transfer``, top to bottom. An import goes down; rooms of one row do not know each other.
LAYERS = [
    {"cli"},
    {"zero3"},
    {"routing"},
    {"policy"},
    {"config_file"},
    {"config", "strategies"},
    {"registry", "testing"},
    {"interface", "measured", "verification"},
    {"memory", "validation"},
    {"nvme", "in_flight"},
    {"accelerator_choice", "profiling", "schema", "tensor_memory"},
    {"errors", "stats"},
    {"accelerators"},
]
DEPTH = {room: depth for depth, row in enumerate(LAYERS) for room in row}
#: What starts no device and no deepspeed only because it is imported late.
DEEPSPEED = ("accelerators/", "transfer/zero3/", "transfer/cli/bench_zero3/", "transfer/cli/demo/")


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {module_of(path) for path in MODULES}


def imports(path):
    """Every module a file imports, wherever in it, with relative ones made absolute; and whether it is at the top."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield (full if full in NAMES else module), id(node) in top


def names(path):
    return path.relative_to(ROOT).as_posix()


def room(module):
    """``memory`` for ``transfer.memory.chunks``; ``transfer`` itself is the face of all of them."""
    parts = module.split(".")
    return parts[1] if parts[0] == "transfer" and len(parts) > 1 else parts[0]


def is_private(module, importer):
    """Whether ``module`` has a part that begins with an underscore, in a folder that ``importer`` is not in."""
    parts = module.split(".")
    return any(
        part.startswith("_") and not part.startswith("__") and importer.split(".")[:index] != parts[:index]
        for index, part in enumerate(parts)
    )


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_imports_go_down(path):
    here = module_of(path)
    for module, _ in imports(path):
        if module.split(".")[0] not in {"accelerators", "transfer"} or here == "transfer":
            continue
        assert module != "transfer", "the face of the package is for users"
        assert room(here) == room(module) or DEPTH[room(here)] < DEPTH[room(module)], f"{here} imports {module}"
        assert not is_private(module, here), f"{here} imports {module}"


def test_every_room_has_a_row():
    assert {room(module_of(path)) for path in MODULES} - {"transfer"} == set(DEPTH)


def test_no_module_imports_itself_through_others():
    graph = {module_of(path): {module for module, _ in imports(path) if module in NAMES} for path in MODULES}
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys() - {name}]:
        for name in leaves:
            del graph[name]
    assert not graph, "each of these imports another one of them"


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_deepspeed_is_known_to_few_and_imported_late(path):
    for module, at_top in imports(path):
        if module.split(".")[0] == "deepspeed":
            assert names(path).startswith(DEEPSPEED)
            # This one defines a subclass of DeepSpeed's, and is itself imported late.
            assert not at_top or names(path) == "accelerators/simulated/deepspeed.py"


@pytest.mark.parametrize("path", [p for p in MODULES if "zero3" in p.relative_to(ROOT).parts], ids=names)
def test_zero3_copies_through_the_interface_alone(path):
    for module, _ in imports(path):
        assert room(module) != "strategies"
        assert module not in {"accelerators.registry", "accelerators.simulated"}


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[-2] != "accelerators"], ids=names)
def test_no_runtime_is_named_outside_accelerators(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in RUNTIMES


@pytest.mark.parametrize("package", [accelerators, transfer])
def test_what_is_public_is_listed_and_documented(package):
    public = {name for name, value in vars(package).items() if not name.startswith("_") and not inspect.ismodule(value)}
    public -= {"annotations", "TYPE_CHECKING", "Any"}
    assert public <= set(package.__all__)
    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert inspect.getdoc(getattr(package, name)), f"{package.__name__}.{name} has no docstring"


def imported_for_types(package):
    """The names that a package imports for type checkers alone, with the modules that they are from."""
    guarded = (node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If))
    for statement in (each for node in guarded for each in node.body if isinstance(each, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.name


def test_what_type_checkers_see_is_what_is_loaded():
    assert sorted(imported_for_types(transfer)) == sorted(transfer._HOME_OF) == transfer.__all__
    source = inspect.getsource(transfer)
    for name, home in transfer._HOME_OF.items():
        assert re.search(rf"    from \.{home} import (\(\n(        \w+,\n)*)?(\w+, )* *{name}\b", source), name


def test_to_import_the_packages_and_the_command_loads_no_torch():
    program = """
        import sys

        import accelerators, transfer, transfer.cli

        heavy = {"torch", "deepspeed", "pydantic", "yaml", "rich", "argparse", "numpy"} & set(sys.modules)
        assert not heavy, heavy
        assert transfer.__doc__ and "build_transfer" in dir(transfer)
        try:
            transfer.no_such_name
        except AttributeError as error:
            assert str(error) == "module 'transfer' has no attribute 'no_such_name'"
        assert "torch" not in sys.modules
        assert "pageable" in transfer.strategy_names(), "whichever name is asked for first"
        assert transfer.nvme.SwappedTensor is transfer.SwappedTensor
        assert transfer.zero3.attach
        """
    done = run_program(program, forked=False)
    assert done.returncode == 0, done.stderr


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


def test_folders_stay_small():
    folders = {path.parent for path in MODULES}
    crowded = {names(folder): number for folder in folders if (number := len(list(folder.glob("*.py")))) > 15}
    assert not crowded, "split by subject"


def test_the_top_level_is_what_the_owner_fixed():
    allowed = {
        "transfer",
        "accelerators",
        "tests",
        "examples",
        "docs",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
    }
    here = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert here - {"build", "dist"} <= allowed
