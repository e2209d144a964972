"""The configuration as an object; ``config_file`` reads it from YAML."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import torch
from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler  # pydantic itself has it from 2.11 on
from pydantic_core import InitErrorDetails, PydanticCustomError
from torch import Tensor
from typing_extensions import Self

from accelerators.plugin_registry import nearest
from accelerators.registry import available_accelerators, explain_unknown

from .errors import StrategyRegistrationError
from .nvme import SwappedTensor
from .registry import MEASURED, explain_unknown_strategy, get_strategy, strategy_names
from .schema.fields import Checked, DtypeName, Flag, SizeBytes, SomeDirectory, Truth, left_out, one_of, refuse
from .schema.model import ConfigModel, StrategyConfig
from .schema.problems import UNDERSTOOD
from .stats import format_bytes


def _accelerator(value: Any) -> str:
    if not isinstance(value, str) or value not in available_accelerators():
        raise refuse(explain_unknown(value) + left_out(value))
    return value


def _strategy(value: Any) -> str:
    if not isinstance(value, str) or value not in strategy_names():
        raise refuse(explain_unknown_strategy(value) + left_out(value))
    return value


def _strategy_or_measured(value: Any) -> str:
    if value == MEASURED:
        return MEASURED
    if isinstance(value, str) and nearest(value, [*strategy_names(), MEASURED]) == MEASURED:
        raise refuse(f"unknown strategy {value!r}. Did you mean {MEASURED!r}?")
    if not isinstance(value, str) or value not in strategy_names():
        raise refuse(explain_unknown_strategy(value, MEASURED) + left_out(value))
    return value


AcceleratorName = Annotated[str, Checked(_accelerator, lambda: {"enum": list(available_accelerators())})]
StrategyName = Annotated[str, Checked(_strategy, lambda: {"enum": list(strategy_names())})]
#: A strategy, or ``measured``: each copy takes the one that a profile of the machine says is fastest.
StrategyOrMeasured = Annotated[str, Checked(_strategy_or_measured, lambda: {"enum": [*strategy_names(), MEASURED]})]
#: When ZeRO-3 waits for a copy-back. None only as a default.
Completion = Annotated[str, one_of("deferred", "immediate")]
#: How much of each copy is compared with the host's own cast.
Verify = Annotated[str, one_of("off", "sample", "full")]


class When(ConfigModel):
    """Conditions on one copy, all of which must hold; at least one must be given.

    Attributes:
        smaller_than: The destination has fewer bytes than this.
        at_least: The destination has this many bytes or more.
        source_dtype: The source has this dtype.
        destination_dtype: The destination has this dtype.
        source_pinned: Whether the device can read the source directly.
    """

    smaller_than: SizeBytes = None
    at_least: SizeBytes = None
    source_dtype: DtypeName = None
    destination_dtype: DtypeName = None
    source_pinned: Flag = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.model_fields_set:
            raise refuse("a rule needs at least one condition")
        if self.smaller_than is not None and self.at_least is not None and self.at_least >= self.smaller_than:
            raise refuse("no copy is both that small and that large")
        return self

    def holds(self, destination: Tensor, source: Tensor | SwappedTensor, source_pinned: bool) -> bool:
        """Whether every condition that was given is true of this copy."""
        size = destination.numel() * destination.element_size()
        return (
            (self.smaller_than is None or size < self.smaller_than)
            and (self.at_least is None or size >= self.at_least)
            and (self.source_dtype is None or source.dtype == self.source_dtype)
            and (self.destination_dtype is None or destination.dtype == self.destination_dtype)
            and (self.source_pinned is None or source_pinned == self.source_pinned)
        )

    def __str__(self) -> str:
        given = [(name, getattr(self, name)) for name in sorted(self.model_fields_set)]
        return ", ".join(f"{name}: {_plain(value)}" for name, value in given)


class Rule(ConfigModel):
    """Which strategy to use for some copies.

    Attributes:
        when: The conditions; all that are given must hold.
        use: A registered strategy.
    """

    when: When
    use: StrategyName


class Zero3Config(ConfigModel):
    """What ZeRO-3 does with optimizer state that is in files (``offload_optimizer.device: nvme``).

    Attributes:
        host_memory: How much of it stays in host memory from step to step, in bytes for each rank.
        paths: Directories on other drives. The files are spread over them and ``nvme_path``.
    """

    host_memory: SizeBytes = 0
    paths: tuple[SomeDirectory, ...] = ()


class TransferConfig(ConfigModel):
    """Everything a user can choose. Beside these fields, each strategy's section under its name.

    Attributes:
        accelerator: A registered accelerator; None: what ``get_accelerator()`` returns.
        strategy: The strategy for every copy from host to device; ``measured``: for each copy the one
            that a profile of the machine says is fastest; None: the default policy.
        completion: ``deferred``: ZeRO-3 waits for a step's copy-backs at the end of the step, so that they
            run behind the CPU optimizer; ``immediate``: in each copy-back, as DeepSpeed does.
        fallback: Whether a copy may take a slower strategy where the one asked for cannot make it.
        verify: ``sample``: of each copy from the host, or from a file, up to 8 KiB of the destination are compared with
            the host's own cast of the source; ``full``: all of it; ``off``: nothing. A wrong element is a
            ``VerificationError`` in ``wait``. ``full`` keeps the cast of each copy in host memory until it is compared.
        rules: Looked at in order, before ``strategy`` and the default; the first match wins.
        zero3: For ZeRO-3 with optimizer state in files.
    """

    # Sections of strategies are extra fields: `_sections` checks them against the registry.
    model_config = ConfigDict(frozen=True, extra="allow")

    accelerator: AcceleratorName | None = None
    strategy: StrategyOrMeasured | None = None
    completion: Completion = "deferred"
    fallback: Truth = True
    verify: Verify = "off"
    rules: tuple[Rule, ...] = Field(default=())
    zero3: Zero3Config = Field(default_factory=Zero3Config)

    @classmethod
    def sections(cls) -> dict[str, type[StrategyConfig]]:
        """Each strategy's name and configuration model, without plug-ins that fail to load."""
        found: dict[str, type[StrategyConfig]] = {}
        for name in strategy_names():
            with contextlib.suppress(StrategyRegistrationError):
                found[name] = get_strategy(name).Config
        return found

    def section(self, strategy: str) -> StrategyConfig:
        """The section of ``strategy``, or its defaults where none was given."""
        given = (self.__pydantic_extra__ or {}).get(strategy)
        return given if given is not None else get_strategy(strategy).Config()

    @model_validator(mode="wrap")
    @classmethod
    def _sections(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        errors: list[InitErrorDetails] = []
        checked: dict[str, Any] = {}
        names = strategy_names()
        for key, value in data.items():
            if key in cls.model_fields:
                checked[key] = value
            elif key in names:
                try:
                    checked[key] = get_strategy(key).Config.model_validate({} if value is None else value)
                except ValidationError as error:
                    errors += _line_errors(error, key)
            else:
                errors.append(InitErrorDetails(type="extra_forbidden", loc=(key,), input=value))
        try:
            instance = handler(checked)
        except ValidationError as error:
            errors += _line_errors(error)
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return instance


def _line_errors(error: ValidationError, *prefix: str) -> list[InitErrorDetails]:
    details = []
    for entry in error.errors(include_url=False):
        kind: Any = entry["type"]
        context = entry.get("ctx", {})
        if kind not in UNDERSTOOD:  # a plug-in's own kind would be unknown to pydantic: its sentence is kept
            kind = PydanticCustomError("h2d", "{reason}", {"reason": entry["msg"]})
        details.append(InitErrorDetails(type=kind, loc=(*prefix, *entry["loc"]), input=entry["input"], ctx=context))
    return details


def _plain(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return format_bytes(value) if type(value) is int else str(value).lower()
