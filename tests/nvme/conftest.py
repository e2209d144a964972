"""A directory that can show faults of alignment."""

import pytest

from transfer.nvme.mounts import is_local


@pytest.fixture
def root(tmp_path):
    """Where to swap out to."""
    assert is_local(tmp_path)
    return tmp_path / "root"
