"""Pytest: ``--require-accelerator=cuda`` turns the skip of a missing accelerator into a failure; ``--schedules``."""

from __future__ import annotations

import pytest

from . import available_accelerators

pytest.register_assert_rewrite("accelerators.testing", "transfer.testing")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("accelerators").addoption(
        "--require-accelerator",
        action="append",
        default=[],
        metavar="NAME",
        help="fail, not skip, tests of this accelerator where it is not available; may be given more than once",
    )
    parser.getgroup("accelerators").addoption(
        "--schedules",
        type=int,
        default=20,
        metavar="NUMBER",
        help="how many drawn schedules of the simulated accelerator a test tries that uses `sample` (default: 20)",
    )


@pytest.fixture(scope="session")
def schedule_seeds(pytestconfig: pytest.Config) -> range:
    """The seeds for ``accelerators.simulated.sample``, as many as ``--schedules`` says."""
    return range(pytestconfig.getoption("--schedules"))


def pytest_configure(config: pytest.Config) -> None:
    known = available_accelerators()
    for name in config.getoption("--require-accelerator"):
        if name not in known:
            raise pytest.UsageError(f"--require-accelerator={name}: unknown; registered are {', '.join(known)}")
