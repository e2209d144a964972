"""``python -m transfer.cli`` is ``h2d``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
