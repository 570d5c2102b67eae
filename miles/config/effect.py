"""Fields that have an effect only with, or not with, other flags: how they say so, and the sentences made from it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic.fields import FieldInfo

from miles.config.section import Rule, Section, default_of, written
from miles.config.values import Values

Predicate = Callable[[Values], bool]


def engines_run(v: Values) -> bool:
    """For `where`."""
    return v.needs_engines


def trainer_runs(v: Values) -> bool:
    """For `where`."""
    return v.needs_trainer


def both_run(v: Values) -> bool:
    """For `where`."""
    return v.needs_engines and v.needs_trainer


@dataclass(frozen=True)
class OnlyWith:
    """In the annotation of a field: where `condition` is not met, the field has no effect.

    `--flag` is met by a switch that is on and by a value that is not the default, `--no-flag` by a switch that is off;
    `--flag A or B` by either value, `--flag above 1` by a larger one, `--flag or --other` by either flag.

    Args:
        condition: flags, as the user is told them.
        note: what the condition is for, behind a comma.
        where: whether the sentence is said at all: a debug mode can be added to most command lines.
        when: whether the condition is met, for one that is more than flags.
        warns: a warning, not a refusal.
    """

    condition: str
    note: str = ""
    where: Predicate | None = None
    when: Predicate | None = None
    warns: bool = False

    def sentence(self, given: str) -> str:
        """What the user is told of a field that was `given` and has no effect."""
        note = f", {self.note}" if self.note else ""
        remedy = "" if self.warns else f"; add {'one' if ' or --' in self.condition else 'that'}, or drop it"
        return f"{given} has no effect without {self.condition}{note}{remedy}"

    def has_effect(self, v: Values, fields: Mapping[str, FieldInfo]) -> bool:
        """Whether the field has one in this configuration."""
        return self._met(v, fields)

    def _met(self, v: Values, fields: Mapping[str, FieldInfo]) -> bool:
        if self.when is not None:
            return self.when(v)
        return any(_holds(flag, value, v, fields) for flag, value in self.alternatives)

    @cached_property
    def alternatives(self) -> list[tuple[str, str]]:
        """Names of fields and the value that each must have; an empty one: any that is not the default."""
        parts: list[tuple[str, str]] = []
        for text in re.split(" or |, ", self.condition):
            if text.startswith("--"):
                flag, _, value = text.removeprefix("--").partition(" ")
                parts.append((flag.replace("-", "_"), value))
            else:
                parts.append((parts[-1][0], text))
        return parts


@dataclass(frozen=True)
class NotWith(OnlyWith):
    """As OnlyWith, the other way round: where `condition` is met, the field has no effect."""

    def sentence(self, given: str) -> str:
        note = f", {self.note}" if self.note else ""
        return f"{given} has no effect with {self.condition}{note}{'' if self.warns else '; drop one'}"

    def has_effect(self, v: Values, fields: Mapping[str, FieldInfo]) -> bool:
        return not self._met(v, fields)


def _holds(name: str, wanted: str, v: Values, fields: Mapping[str, FieldInfo]) -> bool:
    if name not in fields:
        return getattr(v, name.removeprefix("no_")) is False
    value = getattr(v, name)
    if wanted.startswith("above "):
        return value > float(wanted.removeprefix("above "))
    if wanted:
        return str(value) == wanted
    return value is True if isinstance(value, bool) else value != default_of(fields[name])


# Said of fields of several sections.
NO_SAMPLES = NotWith("--loss-type sft_loss", "which learns from no samples")
EVALUATES = OnlyWith(
    "--eval-interval or --num-rollout 0", where=lambda v: v.load_debug_rollout_data is None, warns=True
)


@dataclass(frozen=True, eq=False)
class EffectRule:
    """The rule that an OnlyWith or NotWith of one field makes."""

    name: str
    effect: OnlyWith
    fields: Mapping[str, FieldInfo]

    @property
    def __name__(self) -> str:
        return f"{self.name} {'not' if isinstance(self.effect, NotWith) else 'only'} with {self.effect.condition}"

    def __call__(self, v: Values) -> Iterator[str]:
        value: Any = getattr(v, self.name)
        if value == default_of(self.fields[self.name]) or (self.effect.where is not None and not self.effect.where(v)):
            return
        if not self.effect.has_effect(v, self.fields):
            yield self.effect.sentence(written(self.name, value))


def effect_rules(section: type[Section], fields: Mapping[str, FieldInfo], *, warns: bool) -> list[Rule]:
    """What the annotations of a section's fields refuse, or with `warns` only point out.

    Args:
        fields: of the whole configuration.
    """
    return [
        EffectRule(name, effect, fields)
        for name, field in section.model_fields.items()
        for effect in field.metadata
        if isinstance(effect, OnlyWith) and effect.warns == warns
    ]
