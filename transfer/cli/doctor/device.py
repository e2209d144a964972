"""The accelerator, what it can do, and the machine's profile."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator
from typing import Any

from accelerators import AcceleratorError, get_accelerator
from accelerators.hardware import cores, cpu_model, device_name

from ...errors import ConfigError
from ...measured.profile import MachineProfile
from .finding import Finding, no, note, ok

#: Drivers and torch change faster than that.
_OLD_DAYS = 180
_NEEDED = ("streams", "events", "pins_host_memory", "copies_asynchronously")


def look(name: str | None) -> tuple[Any, list[Finding]]:
    """The accelerator, or None where there is none to copy to; and what was found of it."""
    try:
        chosen = get_accelerator(name)
        reason = chosen.unavailable_reason()
    except AcceleratorError as error:
        return None, [
            no("accelerator", str(error), "one that works", "Install torch and the driver for your hardware.")
        ]
    host = ok("host", f"{cpu_model()}, {cores()} logical cores")
    if reason is not None:
        remedy = "Look at the driver and at torch's build; `--accelerator NAME` takes another one."
        return None, [no("accelerator", f"{chosen.name}: {reason}", "one that works", remedy), host]
    if chosen.name == "cpu":
        found = "none: DeepSpeed takes the CPU"
        remedy = "Nothing is copied to a device here. `h2d demo` shows the same bits on a simulated one."
        return None, [no("accelerator", found, "a device", remedy), host]
    what = (
        "simulated: it tests bits, not speed" if chosen.name == "simulated" else f"{chosen.name}: {device_name(chosen)}"
    )
    findings = [ok("accelerator", what), host, *_capabilities(chosen)]
    return chosen, findings


def _capabilities(accelerator: Any) -> Iterator[Finding]:
    capabilities = accelerator.capabilities
    names = [
        each.name
        for each in dataclasses.fields(capabilities)
        if getattr(capabilities, each.name) is True and each.name != "pin_rounds_to_power_of_two"
    ]
    yield ok("capabilities", ", ".join(name.replace("_", " ") for name in names) or "none")
    for name in (*_NEEDED, "registers_host_memory"):
        reason = capabilities.why_not(name)
        if reason is not None:
            slower = (
                "masters are not page-locked in place" if name == "registers_host_memory" else "copies are pageable"
            )
            yield note(name.replace("_", " "), reason, "it", f"Without it, {slower}, which is slower.")


def look_at_profile(accelerator: Any) -> Finding:
    """The profile that ``strategy: measured`` goes by, whose it is, and how old."""
    again = "`h2d tune`, with the --ranks and --threads of your job, measures again."
    try:
        profile = MachineProfile.load()
    except ConfigError as error:
        return note("profile", str(error), "one that can be read", again)
    if profile is None:
        return ok("profile", "none; only `strategy: measured` needs it, and `h2d tune` makes it")
    mismatch = profile.mismatch(accelerator) if accelerator is not None else None
    age = _age_days(profile.measured.date)
    found = f"of {profile.measured.date[:10]}, {age} days old"
    if mismatch is not None:
        return note("profile", f"{found}. {mismatch}", "one of this machine", again)
    if age > _OLD_DAYS:
        return note("profile", found, f"at most {_OLD_DAYS} days", again)
    return ok("profile", found)


def _age_days(date: str) -> int:
    then = dt.datetime.fromisoformat(date.replace("Z", "+00:00"))
    then = then if then.tzinfo else then.replace(tzinfo=dt.timezone.utc)
    return max(0, (dt.datetime.now(dt.timezone.utc) - then).days)
