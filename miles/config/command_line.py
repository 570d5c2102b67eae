"""The command line: which flags were given, with which values. Types are the configuration's business."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from miles.config.names import flag_of, nearest, negation_of
from miles.config.run_config import RunConfig
from miles.config.section import field_kind
from miles.config.upstream.absent import row_of, sentences
from miles.config.upstream.flags import MEANT, RENAMED
from miles.utils.errors import UserError

KINDS = {name: field_kind(info) for name, info in RunConfig.model_fields.items() if name != "sglang"}
SWITCHES = {flag_of(name): (name, True) for name, kind in KINDS.items() if kind == "bool"} | {
    negation_of(name): (name, False) for name, kind in KINDS.items() if kind == "bool"
}
# Where a list has a default, giving no value is the way to empty it.
MAY_BE_EMPTY = {name for name, kind in KINDS.items() if kind == "list" and RunConfig.model_fields[name].default}
VALUED = {flag_of(name): name for name, kind in KINDS.items() if kind != "bool"}
OWN_FLAGS = ("--config", "--custom-config-path", "--print-config", "--check", "--check-hardware", "--help")
KNOWN_FLAGS = (*SWITCHES, *VALUED, *OWN_FLAGS)


@dataclass
class CommandLine:
    """What was written on the command line, before any type is looked at.

    Attributes:
        values: by field, a text, a list of texts, a bool or an object.
        sglang: by the name of a server argument, the texts after it, or True and False where none followed.
        upstream: by a flag that only Miles and slime have, the texts after it.
        renamed: flags that are called otherwise here.
        config_file, file_above: YAML files that are laid under the command line, and over it.
        repeated: what was given several times with different values, the last of them in brackets.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, list[str] | bool] = field(default_factory=dict)
    upstream: dict[str, list[str]] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    config_file: str | None = None
    file_above: str | None = None
    print_config: bool = False
    check: bool = False
    check_hardware: str | None = None
    help: bool = False
    problems: list[str] = field(default_factory=list)


def read_command_line(argv: list[str]) -> CommandLine:
    """Read `argv` without the program's name. A flag is `--name`; values follow it, or stand behind `=`.

    Of a flag that is given several times the last counts: recipes are changed by what is written behind them.
    """
    line = CommandLine()
    last: dict[str, tuple[str, list[str]]] = {}
    for written, values in _flags_with_values(argv, line.problems):
        flag = RENAMED.get(written, written)
        if flag != written:
            line.renamed.append(f"{written} ({flag})")
        name = _identity(flag)
        if name in last and last[name] != (flag, values):
            line.repeated.append(f"{' '.join((last[name][0], *last[name][1]))} ({' '.join((flag, *values))})")
        last.pop(name, None)
        last[name] = flag, values
    absent = [flag for flag, _ in last.values() if flag not in KNOWN_FLAGS and row_of(flag) is not None]
    line.problems += sentences(absent)
    for flag, values in last.values():
        if flag in absent:
            continue
        try:
            _take(line, flag, values)
        except UserError as error:
            line.problems.append(str(error))
    return line


def _identity(flag: str) -> str:
    """One name for a flag and its opposite."""
    if flag in SWITCHES:
        return flag_of(SWITCHES[flag][0])
    return flag.replace("--no-sglang-", "--sglang-")


def _flags_with_values(argv: list[str], problems: list[str]) -> Iterator[tuple[str, list[str]]]:
    words = ["--help" if word == "-h" else word for word in argv]
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    stray = words[: starts[0]] if starts else words
    if stray:
        problems.append(f"{' '.join(stray)} stands before the first flag; values belong behind a --flag")
    for start, end in itertools.pairwise([*starts, len(words)]):
        flag, equals, value = words[start].partition("=")
        yield flag, ([value] if equals else []) + words[start + 1 : end]


def _take(line: CommandLine, flag: str, values: list[str]) -> None:
    if flag == "--help":
        line.help = True
    elif flag in SWITCHES:
        name, on = SWITCHES[flag]
        if values:
            given = " ".join(values)
            raise UserError(f"{flag} takes no value, got {given}; write {flag_of(name)} or {negation_of(name)}")
        line.values[name] = on
    elif flag in ("--print-config", "--check"):
        if values:
            raise UserError(f"{flag} takes no value, got {' '.join(values)}")
        line.print_config |= flag == "--print-config"
        line.check |= flag == "--check"
    elif flag == "--check-hardware":
        line.check_hardware = _only(flag, values)
    elif flag == "--config":
        line.config_file = _only(flag, values)
    elif flag == "--custom-config-path":
        line.file_above = _only(flag, values)
    elif flag in VALUED:
        line.values[VALUED[flag]] = _read_values(flag, VALUED[flag], values)
    elif flag.startswith("--sglang-"):
        line.sglang[flag.removeprefix("--sglang-").replace("-", "_")] = values or True
    elif flag.startswith("--no-sglang-"):
        if values:
            raise UserError(f"{flag} takes no value, got {' '.join(values)}")
        line.sglang[flag.removeprefix("--no-sglang-").replace("-", "_")] = False
    elif flag in MEANT:
        line.upstream[flag] = values
    else:
        raise UserError(f"{flag} is unknown{nearest(flag, KNOWN_FLAGS)}")


def _only(flag: str, values: list[str]) -> str:
    if len(values) != 1:
        raise UserError(f"{flag} takes one value, got {len(values)}{': ' if values else ''}{' '.join(values)}")
    return values[0]


def _read_values(flag: str, name: str, values: list[str]) -> Any:
    if KINDS[name] == "list":
        if not values and name not in MAY_BE_EMPTY:
            raise UserError(f"{flag} takes one or more values, got none")
        return values
    text = _only(flag, values)
    return read_json_object(flag, text) if KINDS[name] == "dict" else text


def read_json_object(where: str, text: str) -> dict[str, Any]:
    """The object that `text` holds as JSON; ValueError names `where` it was written."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} takes a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f'{where} takes a JSON object such as {{"key": 1}}, got {text!r}')
    return value
