"""What a configuration must satisfy. Each rule says what was given, what is allowed and what to do."""

from collections.abc import Iterator
from typing import Any, get_args

from miles.config.effect import effect_rules
from miles.config.names import flag_of
from miles.config.paths import PathText, TriedText
from miles.config.run_config import SECTIONS, RunConfig
from miles.config.section import Rule, Section, base_type
from miles.config.values import Undetermined, Values

FIELDS = RunConfig.model_fields
# Nobody else looks into these.
TRAINERS_OWN = (
    *("load", "save", "save_hf", "critic_load", "critic_save", "ref_load", "opd_teacher_load"),
    "update_weight_disk_dir",
)


def tried_type(annotation: Any) -> type[TriedText] | None:
    """The kind of text that a field holds, alone or as a list, and that can be tried; None of any other field."""
    kind = base_type(annotation)
    for candidate in (kind, *get_args(kind)):
        if isinstance(candidate, type) and issubclass(candidate, TriedText):
            return candidate
    return None


KINDS = {name: kind for name, info in FIELDS.items() if (kind := tried_type(info.annotation))}


def tried_texts(v: Values) -> Iterator[str]:
    """Every path is tried on the driver's machine before anything starts, and so is how a dotted path is written."""
    seen: set[tuple[type, str]] = set()  # a path that another follows from is tried once
    for name, kind in KINDS.items():
        try:
            value = getattr(v, name)
            if name in TRAINERS_OWN and not v.needs_trainer:
                continue
        except Undetermined:
            continue
        for path in value if isinstance(value, list) else [value]:
            if path is not None and (kind, path) not in seen:
                if issubclass(kind, PathText):
                    seen.add((kind, path))
                if problem := kind.problem(flag_of(name), path):
                    yield problem


def rules_of(section: type[Section]) -> list[Rule]:
    """What refuses the fields of one section: their annotations, then its rules."""
    return effect_rules(section, FIELDS, warns=False) + section.rules()


RULES: list[Rule] = [tried_texts, *(one for section in SECTIONS for one in rules_of(section))]
WARNINGS: list[Rule] = [
    one for section in SECTIONS for one in (*effect_rules(section, FIELDS, warns=True), *section.warnings())
]


def validate(v: Values) -> list[str]:
    """Every problem of a configuration; a rule that reads a value which is not known has nothing to say."""
    problems: list[str] = []
    for rule in RULES:
        try:
            problems += rule(v)
        except Undetermined:
            continue
    return problems


def warn(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    for warning in WARNINGS:
        yield from warning(v)
