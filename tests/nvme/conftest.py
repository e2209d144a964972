"""Every reader, and a directory that can show faults of alignment."""

import os
import warnings

import pytest

from accelerators import deepspeed_aio
from transfer.nvme.mounts import is_local


@pytest.fixture(params=["posix", "aio"])
def reader(request):
    if request.param == "aio":
        skip_without_aio()
    return request.param


def skip_without_aio():
    if os.environ.get("H2D_TEST_AIO") != "1":
        pytest.skip("H2D_TEST_AIO=1 is not set, and loading DeepSpeed's aio op takes seconds.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = deepspeed_aio.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def root(tmp_path):
    """Where to swap out to."""
    assert is_local(tmp_path)
    return tmp_path / "root"
