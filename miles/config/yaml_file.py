"""YAML files; that of `--config` has field names and their values, laid under the command line."""

from collections.abc import Hashable
from typing import Any

import yaml

from miles.config.command_line import KINDS
from miles.config.names import nearest
from miles.config.paths import absolute
from miles.utils.errors import UserError

FIELD_NAMES = tuple(KINDS)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where plain YAML keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def load_yaml(flag: str, path: str) -> tuple[Any, list[str]]:
    """What the file that `flag` names holds, None if nothing; and what is wrong with it."""
    try:
        with open(absolute(path), encoding="utf-8") as stream:
            return yaml.load(stream, _Loader), []
    except OSError as error:
        return None, [f"{flag} {path} cannot be read: {error.strerror}"]
    except UserError as error:
        return None, [f"{flag} {path}: {error}"]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return None, [f"{flag} {path} is not valid YAML: {' '.join(str(error).split())}"]


def read_yaml(path: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Values of fields, values of SGLang arguments (without `sglang_`), and what is wrong with the file.

    Keys are field names with underscores. Paths in values that are relative belong to the working directory, not to the
    file.
    """
    content, problems = load_yaml("--config", path)
    if content is None:
        return {}, {}, problems
    if not isinstance(content, dict):
        return {}, {}, [f"--config {path} must hold `name: value` lines, got a {type(content).__name__}"]
    values: dict[str, Any] = {}
    sglang: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key)
        if name in KINDS:
            values[name] = value
        elif name.startswith("sglang_"):
            sglang[name.removeprefix("sglang_")] = value
        else:
            problems.append(f"{path}: key {name} is unknown{nearest(name.replace('-', '_'), FIELD_NAMES)}")
    return values, sglang, problems
