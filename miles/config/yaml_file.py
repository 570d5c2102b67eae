"""YAML files that a flag names."""

from collections.abc import Hashable
from typing import Any

import yaml

from miles.config.paths import absolute
from miles.utils.errors import UserError


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
