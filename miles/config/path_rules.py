"""Every path of the configuration is tried on the driver's machine before anything starts."""

from collections.abc import Iterator
from typing import Any, get_args

from miles.config.names import flag_of
from miles.config.paths import PathText
from miles.config.run_config import RunConfig
from miles.config.section import base_type
from miles.config.values import Undetermined, Values

# Nobody else looks into these.
TRAINERS_OWN = (
    *("load", "save", "save_hf", "critic_load", "critic_save", "ref_load", "opd_teacher_load"),
    "update_weight_disk_dir",
)


def path_type(annotation: Any) -> type[PathText] | None:
    """The kind of path that a field holds, alone or as a list; None of a field that holds none."""
    kind = base_type(annotation)
    for candidate in (kind, *get_args(kind)):
        if isinstance(candidate, type) and issubclass(candidate, PathText):
            return candidate
    return None


KINDS = {name: kind for name, info in RunConfig.model_fields.items() if (kind := path_type(info.annotation))}


def _paths(v: Values) -> Iterator[str]:
    seen: set[tuple[type, str]] = set()  # one that another follows from is tried once
    for name, kind in KINDS.items():
        try:
            value = getattr(v, name)
            if name in TRAINERS_OWN and not v.needs_trainer:
                continue
        except Undetermined:
            continue
        for path in value if isinstance(value, list) else [value]:
            if path is not None and (kind, path) not in seen:
                seen.add((kind, path))
                if problem := kind.problem(flag_of(name), path):
                    yield problem


PATH_RULES = [_paths]
