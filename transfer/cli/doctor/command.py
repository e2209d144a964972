"""``h2d doctor``: what was found, what is wanted, what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from ..arguments import Parser
from ..quiet import looking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .finding import Finding

SCHEMA_VERSION = 1

_DESCRIPTION = """\
Is this machine fit, and would it be served? Looks at the accelerator, its
link and driver, NUMA placement, memory, torch, DeepSpeed, compiled ops, the
profile, and what hides this package; with --config also at a configuration,
with --nvme at a drive. Changes nothing, and compiles nothing.

The report is made to be pasted into an issue: it has no names of hosts and
users, no home paths and no values of environment variables, unless --full.
"""

_EPILOG = """\
examples:
  h2d doctor
  h2d doctor --config ds_config.json --nvme /local_nvme
  h2d doctor --json > doctor.json

Exit status: 0; 1 if something keeps this package from working here; 2 if an
argument is wrong; 130 after Ctrl-C.
"""

Section = tuple[str, "list[Finding]"]


def main(arguments: Sequence[str]) -> int:
    """Looks, and tells."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with looking():
        if options.accelerator is not None:
            from accelerators.registry import available_accelerators, explain_unknown

            if options.accelerator not in available_accelerators():
                parser.error(f"argument --accelerator: {explain_unknown(options.accelerator)}")
        sections = list(_sections(options.config, options.accelerator, options.nvme))
        if not options.full:
            from .private import without_names

            sections = [(title, [without_names(each, options.nvme) for each in found]) for title, found in sections]
    everything = [each for _, found in sections for each in found]
    fit = all(each.status != "no" for each in everything)
    if options.json:
        findings = [{"section": title, **asdict(each)} for title, found in sections for each in found]
        print(
            json.dumps(
                {"schema_version": SCHEMA_VERSION, "command": "doctor", "fit": fit, "findings": findings}, indent=1
            )
        )
    else:
        from .report import show

        show(sections)
    return 0 if fit else 1


def _sections(config: str | None, accelerator: str | None, nvme: str | None) -> Iterator[Section]:
    from . import configuration, device, drive, link, memory, software

    checked, about_config = configuration.look(config)
    if accelerator is None and checked is not None and checked.config is not None:
        accelerator = checked.config.accelerator
    chosen, about_device = device.look(accelerator)
    yield "accelerator", about_device
    yield "link", _all(link.look)
    yield "memory", _all(memory.look)
    yield "software", [*_all(software.look), *_all(software.look_at_ops)]
    yield "configuration", [*about_config, device.look_at_profile(chosen)]
    if nvme is not None:
        yield "drive", _all(lambda: drive.look(nvme))


def _all(look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What one look finds; where it fails itself, that."""
    from .finding import unknown

    found: list[Finding] = []
    try:
        found.extend(look())
    except Exception as error:  # noqa: BLE001 - a report with a gap is worth more than none
        found.append(unknown("look", f"failed: {type(error).__name__}: {error}"))
    return found


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="h2d doctor", description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("--config", metavar="FILE", help="a YAML file or a DeepSpeed config (.json); default: $H2D_CONFIG")
    add("--nvme", metavar="DIR", help="look at the drive of this directory; writes one block there")
    add("--accelerator", metavar="NAME", help="a registered name; default: what DeepSpeed chooses")
    add("--full", action="store_true", help="with names, paths and values, for yourself")
    add("--json", action="store_true", help="print the report as JSON")
    return parser
