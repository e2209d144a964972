"""The environment variable that names a configuration; apart, as `h2d run` asks for it before torch is loaded."""

from __future__ import annotations

import os

#: Names the YAML file to use where no configuration is given as an argument.
ENVIRONMENT_VARIABLE = "H2D_CONFIG"


def environment_path() -> str:
    """The file that ``$H2D_CONFIG`` names; empty where it is unset or blank."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
