"""Bases of the configuration models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from ..errors import ConfigError
from .problems import format_value, problems_of

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # which has no public name


class _RaisesConfigError(ModelMetaclass):
    """Turns pydantic's error into ours where a model is called; nested models keep their paths."""

    def __call__(cls, /, *args: Any, **fields: Any) -> Any:  # noqa: N805 - of a metaclass
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            raise ConfigError(problems_of(error, cast(type[BaseModel], cls))) from error


class ConfigModel(BaseModel, metaclass=_RaisesConfigError):
    """Frozen, nothing extra allowed, picklable. Calling it with mistakes raises ``ConfigError``.

    pydantic's own methods, such as ``model_validate``, raise pydantic's ``ValidationError``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Any:
        """What was given, and not every default."""
        given = self.model_fields_set | set(self.__pydantic_extra__ or ())
        return [(name, value) for name, value in super().__repr_args__() if name in given]

    #: Keys of earlier versions, to what they are called now; for hints alone.
    renamed: ClassVar[Mapping[str, str]] = {}


class StrategyConfig(ConfigModel):
    """Base of every strategy's own configuration; has no fields."""

    def simpler(self) -> Self | None:
        """A configuration that needs less, to be tried where the system refuses this one; None if there is none."""
        return None


C = TypeVar("C", bound=ConfigModel)


def strategy_config(model: type[C], given: ConfigModel | Mapping[str, Any] | None, options: Mapping[str, Any]) -> C:
    """An instance of ``model`` from an instance, a mapping or nothing, or else from ``options``.

    Raises:
        ConfigError: ``given`` is of another kind, both are given, or a field is not allowed.
    """
    if given is None:
        return model(**options)
    if options:
        raise ConfigError(f"give either config or the options {', '.join(options)}, not both")
    if isinstance(given, model):
        return given
    if isinstance(given, Mapping):
        return model(**{str(key): value for key, value in given.items()})
    raise ConfigError(f"expected a {model.__name__} or a mapping, found {format_value(given)}")
