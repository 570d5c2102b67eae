"""The texts of `--help` and `--print-config`."""

import shutil
import textwrap
from typing import Any

from pydantic.fields import FieldInfo

from miles.config.names import flag_of, negation_of
from miles.config.paths import FunctionPath, PathText
from miles.config.resolve import Resolved
from miles.config.run_config import SECTIONS
from miles.config.secrets import masked, secrets_of
from miles.config.section import base_type, field_kind

USAGE = """\
usage: python train.py [--config FILE.yaml] [--flag VALUE ...]

Every flag below is also a key of the YAML file, with underscores; the command line wins. A switch --x is turned off by
--no-x (--no-x by --x). Names are never abbreviated."""


def value_hint(field: FieldInfo) -> str:
    """What stands behind the flag in the help: INT, {a,b}, TEXT ..."""
    kind = base_type(field.annotation)
    match field_kind(field):
        case "bool":
            return ""
        case "dict":
            return "JSON"
        case "list":
            return f"{_word(kind.__args__[0])} ..."
    return _word(kind)


def _word(kind: Any) -> str:
    words = {int: "INT", float: "FLOAT", str: "TEXT", FunctionPath: "TEXT"}
    if isinstance(kind, type) and issubclass(kind, PathText):
        return "PATH"
    return words[kind] if kind in words else "{" + ",".join(map(str, kind.__args__)) + "}"


def default_text(field: FieldInfo) -> str:
    """The default as it would be written, or `required`, or `unset`."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if field_kind(field) == "bool" and default is not None:
        return "on" if default else "off"
    if isinstance(default, list):
        return " ".join(default)
    return "unset" if default is None else "none" if default == {} else str(default)


def help_text() -> str:
    """All flags by section, with what stands behind them, their meaning and their default."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [USAGE, "", "This command"]
    lines += _entry("--config FILE", "YAML file laid under the command line.", width)
    lines += _entry("--custom-config-path FILE", "YAML file laid over the command line.", width)
    lines += _entry("--print-config", "Print each value and where it came from, and exit.", width)
    lines += _entry(
        "--check",
        "Print what the run needs of GPUs, hosts and time, phase by phase, and which flags would make it fit, and "
        "exit, with status 1 if it does not fit.",
        width,
    )
    lines += _entry(
        "--check-hardware NAME",
        "--check for such machines: A100, H100, H200, B200, B300, GB200 or GB300 [this one].",
        width,
    )
    lines += _entry("--help", "Print this, and exit.", width)
    for section in SECTIONS:
        lines += ["", section.title]
        for name, field in section.model_fields.items():
            if name == "sglang":
                lines += _entry("--sglang-NAME VALUE", str(field.description), width)
                continue
            head = f"{flag_of(name)} {value_hint(field)}".rstrip()
            if field_kind(field) == "bool":
                head += f", {negation_of(name)}"
            lines += _entry(head, f"{field.description} [{default_text(field)}]", width)
    return "\n".join(lines)


def _entry(head: str, text: str, width: int) -> list[str]:
    # Flags are not broken at their hyphens, so that they can be searched for and copied.
    wrapped = textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return [f"  {head}", *wrapped]


def config_text(resolved: Resolved) -> str:
    """Each value of a configuration and where it came from, by section, in aligned columns; of secrets only stars."""
    config, origins = resolved.config, resolved.provenance
    secrets = list(secrets_of(config.model_dump()))
    blocks = []
    for section in SECTIONS:
        rows = [(name, getattr(config, name)) for name in section.model_fields if name != "sglang"]
        if "sglang" in section.model_fields:
            rows = [(f"sglang_{name}", value) for name, value in config.sglang.items()]
        if rows:
            shown = [(name, masked(_shown(value), secrets), origins[name]) for name, value in rows]
            blocks.append((section.title, shown))
    names, values = (max(len(row[i]) for _, rows in blocks for row in rows) for i in (0, 1))
    lines: list[str] = []
    for title, shown in blocks:
        lines += ["", title] if lines else [title]
        lines += [f"  {name:{names}}  {value:{min(values, 40)}}  {origin}" for name, value, origin in shown]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
