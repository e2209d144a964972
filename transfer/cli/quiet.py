"""Commands that answer a question say that they look, and drop what libraries say meanwhile."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """A block in which torch and deepspeed may be imported: it takes seconds, which a line on the standard error says.

    What they print, or log up to warnings, is dropped: the report says it.
    """
    print("Looking. This imports torch and DeepSpeed, which takes some seconds.", file=sys.stderr, flush=True)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
