"""Where a machine's profile is; apart, as `h2d plan` asks whether there is one before torch is loaded."""

from __future__ import annotations

import os
from pathlib import Path

#: Names the profile to use where no path is given as an argument.
ENVIRONMENT_VARIABLE = "H2D_PROFILE"


def default_path() -> Path:
    """``$XDG_CACHE_HOME/host-to-device-transfer/profile.yaml``, by default under ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of that variable says that a relative path is to be ignored.
    folder = Path(cache) if Path(cache).is_absolute() else Path("~/.cache").expanduser()
    return folder / "host-to-device-transfer" / "profile.yaml"


def may_exist() -> bool:
    """Whether a profile is named, or the default one is there. False: there is none."""
    return bool(os.environ.get(ENVIRONMENT_VARIABLE, "").strip()) or default_path().exists()
