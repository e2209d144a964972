"""Runs a shipped suite on a file of wrong implementations, and reads which of its tests have failed."""

import re

from tests.running import run_python


def outcomes(file, caught_by):
    """What happened to each test, and its one line, by the name of the class and of the test.

    The class ``TestSound`` of the file is run as a whole; of each other one the test that ``caught_by`` names.
    """
    chosen = [f"{file}::TestSound", *(f"{file}::Test{name}::{test}" for name, test in caught_by.items())]
    options = ["-q", "-rA", "--tb=line", "--show-capture=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    done = run_python("-m", "pytest", *options, *chosen, timeout=250, environment={"COLUMNS": "500"})
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::Test(\w+)::([^\n]+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {(name, test): (outcome, line) for outcome, name, test, line in found}


def wrong_ones(file):
    """The names of all classes of the file but the sound one, and those that are tests."""
    names = re.findall(r"^class (\w+)\(", file.read_text(), re.MULTILINE)
    return {name for name in names if name != "Sound" and not name.startswith("Test")}
