"""A section of the configuration is one file: its fields, and below them what follows from them and what must hold.

A field that has an effect only with, or not with, other flags says so in its annotation, and the sentence for the user
is made from that (miles/config/effect.py):

    opsm_delta: Annotated[float, OnlyWith("--use-opsm")] = Field(1e-4, ge=0, description="...")

So does one that has another field's value while it is unset: `Annotated[float | None, SameAs("rollout_top_p")]`.

Everything else is a generator below the class, registered by its decorator. It reads the whole configuration as `v`; a
value that was given wrongly ends it, for nothing is known then.

    @derives("bf16")
    def _precision(v: Values) -> Iterator[Derived]:  # a field, its value, and the reason that --print-config shows
        if v.bf16 is None:
            yield "bf16", v.device == "cuda", f"--device {v.device}"

    @rule
    def _initial_rate(v: Values) -> Iterator[str]:  # refuses: what was given, what is allowed, what to do
        if v.lr_warmup_init > v.lr:
            yield f"--lr-warmup-init {v.lr_warmup_init} is above --lr {v.lr}; the warm-up rises, so give a lower one"

    @warning
    def _no_rate(v: Values) -> Iterator[str]:  # what is allowed, and probably not meant
        if v.lr == 0:
            yield "--lr 0: the weights will not change"

They are asked section by section in the order of SECTIONS in miles/config/run_config.py, and from top to bottom in
each. What they say stands in tests/fast/config/sentences/, a file a section. Code that runs later takes nothing from
below a section's class: what it asks of a configuration is a property of Layout.
"""

import functools
import json
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from miles.config.names import flag_of, negation_of
from miles.config.values import Values
from miles.utils.errors import UserError

FieldKind = Literal["bool", "list", "dict", "scalar"]
Rule = Callable[[Values], Iterator[str]]
Derived = tuple[str, Any, str]


class SameAs(NamedTuple):
    """In the annotation of a field: while it is unset, it has the value of the field `name`."""

    name: str


class Derivation(NamedTuple):
    """A function that yields values of fields, and the names of these."""

    names: tuple[str, ...]
    function: Callable[[Values], Iterator[Derived]]


_RULES: list[Rule] = []
_WARNINGS: list[Rule] = []
_DERIVATIONS: list[Derivation] = []


def rule(function: Rule) -> Rule:
    """Register what refuses a configuration."""
    _RULES.append(function)
    return function


def warning(function: Rule) -> Rule:
    """Register what is printed before the run starts."""
    _WARNINGS.append(function)
    return function


def derives(
    *names: str,
) -> Callable[[Callable[[Values], Iterator[Derived]]], Callable[[Values], Iterator[Derived]]]:
    """Register what fills in these fields. One whose function reads an unknown value is unknown too, if it is unset."""

    def register(function: Callable[[Values], Iterator[Derived]]) -> Callable[[Values], Iterator[Derived]]:
        _DERIVATIONS.append(Derivation(names, function))
        return function

    return register


def base_type(annotation: Any) -> Any:
    """The type of a field without its `None` alternative: `int | None` gives `int`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (only,) = [option for option in get_args(annotation) if option is not type(None)]
        return only
    return annotation


def field_kind(field: FieldInfo) -> FieldKind:
    """How a field's value is written: a switch, one value, several values, or a JSON object."""
    kind = base_type(field.annotation)
    if kind is bool:
        return "bool"
    origin = get_origin(kind) or kind
    return "list" if origin is list else "dict" if origin is dict else "scalar"


def written(name: str, value: Any) -> str:
    """A field and its value as on a command line: `--colocate`, `--no-colocate`, `--rollout-stop a b`."""
    if isinstance(value, bool):
        return flag_of(name) if value else negation_of(name)
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = json.dumps(value) if isinstance(value, dict) else text
    return f"{flag_of(name)} {text}".rstrip()


class Section(BaseModel):
    """Base of every section: frozen, and closed to names it does not declare."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    title: ClassVar[str]

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and base_type(cls.model_fields[f"{info.field_name}"].annotation) in (int, float):
            raise UserError("a number is needed here, not true or false")
        return value

    @classmethod
    def changed(cls, v: Values, *names: str) -> list[str]:
        """Those of the named fields, or of all, that differ from their defaults, as on a command line."""
        values = [(name, getattr(v, name)) for name in names or cls.model_fields]
        return [written(name, value) for name, value in values if value != default_of(cls.model_fields[name])]

    @classmethod
    def rules(cls) -> list[Rule]:
        """The rules of the section's file."""
        return [function for function in _RULES if function.__module__ == cls.__module__]

    @classmethod
    def warnings(cls) -> list[Rule]:
        """The warnings of the section's file."""
        return [function for function in _WARNINGS if function.__module__ == cls.__module__]

    @classmethod
    def derivations(cls) -> list[Derivation]:
        """The derivations of the section's file, and behind them those of its annotations."""
        sources = {name: field.metadata for name, field in cls.model_fields.items()}
        return derivations_of(cls.__module__) + [
            Derivation((name,), functools.partial(_same, name, source.name))
            for name, metadata in sources.items()
            for source in metadata
            if isinstance(source, SameAs)
        ]


def _same(name: str, source: str, v: Values) -> Iterator[Derived]:
    if getattr(v, name) is None and getattr(v, source) is not None:
        yield name, getattr(v, source), flag_of(source)


def derivations_of(module: str) -> list[Derivation]:
    """The derivations of one file."""
    return [derivation for derivation in _DERIVATIONS if derivation.function.__module__ == module]


def default_of(field: FieldInfo) -> Any:
    """The value of a field that is not given."""
    return field.get_default(call_default_factory=True)
