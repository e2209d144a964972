"""``h2d run train.py ...``: a training script as it is, with every ZeRO-3 engine attached."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Runs the script in this process, as ``python script`` would; its exit status is its own."""
    parser = argparse.ArgumentParser(
        prog="h2d run",
        description=(
            "Runs a training script with every ZeRO-3 engine attached, as `transfer.zero3.install()` at its top "
            "would. Under a launcher, this command takes the script's place: "
            "`torchrun --nproc_per_node 2 -m transfer.cli run train.py --lr 1e-4`, "
            "`deepspeed --module transfer.cli run train.py`, `accelerate launch -m transfer.cli run train.py`."
        ),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; default: $H2D_CONFIG, or each DeepSpeed config")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    launchers = [each for each in arguments[:1] if each.startswith("--local_rank=")]  # which is the script's
    options = parser.parse_args(arguments[len(launchers) :])
    if not options.is_module and not Path(options.script).is_file():
        parser.error(f"there is no script {options.script!r} here")
    if options.is_module:
        sys.path.insert(0, str(Path.cwd()))
        if importlib.util.find_spec(options.script.partition(".")[0]) is None:
            parser.error(f"there is no module {options.script!r}")
    from .. import zero3

    try:
        zero3.install(options.config)
    except ConfigError as error:
        print(f"h2d run: {error}", file=sys.stderr)
        return 2
    sys.argv = [options.script, *launchers, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")
    return 0
