"""From the command line to a checked configuration."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError, create_model

from miles.config.command_line import KINDS, CommandLine, read_command_line
from miles.config.derive import derive
from miles.config.names import flag_of, nearest
from miles.config.paths import as_given
from miles.config.run_config import RunConfig
from miles.config.section import Section
from miles.config.sglang_args import check_sglang
from miles.config.upstream.absent import absent_values, row_of, sentences
from miles.config.upstream.flags import as_named, contradictions
from miles.config.upstream.values import Taken, texts_taken, values_taken
from miles.config.validate import validate, warn
from miles.config.values import Values
from miles.config.yaml_file import load_yaml
from miles.utils.errors import UserError


class ConfigError(UserError):
    """A configuration that cannot run; `problems` has one sentence for each thing to change."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1)))


@dataclass(frozen=True)
class Resolved:
    """A configuration, where each value came from (SGLang's as `sglang_NAME`), and what is odd about it."""

    config: RunConfig
    provenance: dict[str, str]
    warnings: list[str]


def resolve(argv: list[str]) -> Resolved:
    """The configuration that `argv` (without the program's name) describes.

    Raises ConfigError with every problem of the command line, the YAML file, the types and the checks together.
    """
    return resolve_command_line(read_command_line(argv))


def resolve_command_line(line: CommandLine) -> Resolved:
    """`resolve`, of a command line that has been read."""
    problems = list(line.problems)
    below, below_sglang, below_problems = _read_file("--config", line.config_file)
    above, above_sglang, above_problems = _read_file("--custom-config-path", line.file_above)
    problems += below_problems + above_problems

    layers = [
        (f"YAML ({line.config_file})", below),
        ("command line", line.values),
        (f"YAML ({line.file_above})", above),
    ]
    origins = {name: origin for origin, values in layers for name in values}
    names = [origin for origin, _ in layers]
    sglang, sglang_origins, older, sglang_problems = check_sglang(
        list(zip(names, (below_sglang, line.sglang, above_sglang), strict=True))
    )
    problems += sglang_problems

    raw, notes = _take(below | line.values | above, texts_taken)
    absent = absent_values(raw)
    problems += absent.values()
    sound, type_problems = _convert({name: value for name, value in raw.items() if name not in absent}, origins)
    problems += type_problems
    known = {name: value for name, value in sound.items() if name not in absent}
    known, more = _take(known | {"sglang": sglang}, lambda values: values_taken(Values(values)))
    notes |= more
    values, reasons = derive(known, datetime.now())
    problems += validate(Values(values))
    problems += contradictions(line.upstream, Values(values))
    if problems:
        raise ConfigError([as_given(problem) for problem in problems])

    provenance = {name: "default" for name in values if name != "sglang"} | origins
    provenance |= {f"sglang_{name}": origin for name, origin in sglang_origins.items()}
    provenance |= {name: f"in place of {note}" for name, note in notes.items() if name != "sglang"}
    provenance |= {name: f"derived: {reason}" for name, reason in reasons.items()}
    changes_nothing = [*dict.fromkeys(notes.values()), *older, *line.renamed, *map(as_named, line.upstream)]
    replaced = [flag_of(name) for name in above if str(line.values.get(name, above[name])) != str(above[name])]
    replaced += [flag_of(f"sglang_{name}") for name, value in above_sglang.items() if _differs(line, name, value)]
    warnings = [
        *_repeated(line.repeated),
        *_replaced(replaced),
        *_without_effect(changes_nothing),
        *warn(Values(values)),
    ]
    given = origins.keys() - notes.keys()
    return Resolved(RunConfig(**values).with_given(given), provenance, [as_given(warning) for warning in warnings])


def _take(
    values: Mapping[str, Any], taken: Callable[[Mapping[str, Any]], Iterable[Taken]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with those in their place that are `taken`, and what the user is told, by field."""
    changed, notes = dict(values), {}
    for name, value, note in taken(values):
        changed[name], notes[name] = value, note
        if value is None and RunConfig.model_fields[name].default is not None:
            del changed[name]
    return changed, notes


def _repeated(repeated: list[str]) -> Iterator[str]:
    if repeated:
        yield f"given more than once with different values, of which the last counts: {', '.join(repeated)}"


def _differs(line: CommandLine, name: str, value: Any) -> bool:
    """Whether the command line has another value of a server argument, which it has as texts."""
    return name in line.sglang and line.sglang[name] not in (value, [str(value)])


def _replaced(flags: list[str]) -> Iterator[str]:
    if flags:
        yield f"--custom-config-path has other values than the command line, and its values count: {', '.join(flags)}"


def _without_effect(flags: list[str]) -> Iterator[str]:
    if flags:
        yield (
            f"{len(flags)} flag{'s' * (len(flags) > 1)} of Miles or slime change{'s' * (len(flags) == 1)} nothing "
            "(config.json says it, it is done anyway, or the reason stands behind it): " + ", ".join(flags)
        )


def _read_file(flag: str, path: str | None) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Values of fields, values of SGLang arguments (without `sglang_`), and what is wrong with the file.

    Keys are field names with underscores. Paths in values that are relative belong to the working directory, not to the
    file.
    """
    if path is None:
        return {}, {}, []
    content, problems = load_yaml(flag, path)
    if content is None:
        return {}, {}, problems
    if not isinstance(content, dict):
        return {}, {}, [f"{flag} {path} must hold `name: value` lines, got a {type(content).__name__}"]
    values: dict[str, Any] = {}
    sglang: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key)
        if name in KINDS:
            values[name] = value
        elif name.startswith("sglang_"):
            sglang[name.removeprefix("sglang_")] = value
        elif row_of(flag_of(name)) is not None:
            problems += [f"{path}: {sentence}" for sentence in sentences([flag_of(name)])]
        else:
            problems.append(f"{path}: key {name} is unknown{nearest(name.replace('-', '_'), KINDS)}")
    return values, sglang, problems


def _convert(raw: Mapping[str, Any], origins: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """All fields with their types, without those that were given wrongly or are missing, and what is wrong."""
    try:
        return dict(RunConfig(**raw)), []
    except ValidationError as error:
        problems: dict[str, str] = {}
        for detail in error.errors():
            problems.setdefault(str(detail["loc"][0]), _explain(detail, origins))
    sound = {name: info for name, info in RunConfig.model_fields.items() if name not in problems}
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in sound.items()}
    partial = create_model("Partial", __base__=Section, **fields)
    return dict(partial(**{name: raw[name] for name in raw if name in sound})), list(problems.values())


def _explain(detail: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    name, *path = detail["loc"]
    if detail["type"] == "missing":
        return f"{flag_of(name)} is required: {RunConfig.model_fields[name].description}"
    place = "".join(f"[{step}]" for step in path)
    where = flag_of(name) if origins[name] == "command line" else f"{origins[name]}: {name}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where}{place} is {detail['input']!r}: {message[0].lower()}{message[1:]}"
