"""Paths that are given: made absolute where they are read, and tried before anything starts."""

import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic_core import core_schema

from miles.config.dotted_paths import dotted_path_problem
from miles.hf.shape import read_config_json
from miles.utils.checkpoint_folder import MARKER
from miles.utils.errors import UserError

# Files of --save-debug-rollout-data.
SAMPLE_FILE_ENDINGS = (".jsonl.gz", ".jsonl")
PROMPT_FILE_ENDINGS = (".jsonl", ".parquet")
SLICE = re.compile(r"(.+)@\[(.*)\]")


def split_slice(path: str) -> tuple[Path, slice]:
    """`file@[a:b]` as the file and the rows that Python's slice [a:b] takes; a path without one has all.

    Raises: ValueError if what stands in the brackets is no such slice.
    """
    match = SLICE.fullmatch(path)
    if match is None:
        return Path(path), slice(None)
    bounds = re.fullmatch(r" *(-?[0-9]*) *: *(-?[0-9]*) *", match[2])
    if bounds is None or "-" in bounds.groups():
        raise UserError(
            f"{path}: [{match[2]}] must be [a:b], the rows from a up to, without, b; either may be missing or be "
            "counted from the end (-100), and there is no step"
        )
    return Path(match[1]), slice(*(int(bound) if bound else None for bound in bounds.groups()))


def absolute(path: str) -> str:
    """The path with `~` and $NAME filled in and from the root on, so that it means the same in every process.

    Raises: ValueError if it is empty, or names a variable or a user that is unknown.
    """
    if not path.strip():
        raise UserError("a path is needed, and it is empty; leave the flag out, or write . for the working directory")
    filled = os.path.expanduser(os.path.expandvars(path))
    if unset := re.search(r"\$(\w+|\{\w+\})", filled):
        raise UserError(f"{unset[0]} is not set in the environment")
    if filled.startswith("~"):
        raise UserError(f"{filled.partition('/')[0]} is no user of this machine")
    return str(Path(filled).absolute())


def as_given(text: str) -> str:
    """A sentence for the user, without the working directory before the paths in it."""
    return text.replace(f"{Path.cwd()}/", "")


class TriedText(str):
    """The type of a field that holds a text which is tried before anything starts; its value is a str."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.str_schema()

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        """What is wrong with a text of this kind on this machine, in one sentence; None if nothing is."""
        return None


class FunctionPath(TriedText):
    """A function or class of the user's own, by dotted path."""

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        return dotted_path_problem(flag, path, "my_module.my_function")


class PathText(TriedText):
    """A path, which is made `absolute` where it is read."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(absolute, core_schema.str_schema())


class NodePath(PathText):
    """A folder of each node's own, which need not be what is seen here."""


class InputFile(PathText):
    """A file that is read."""

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        return _file_problem(flag, path, path)


class PromptFile(PathText):
    """A file of prompts, or a slice of one."""

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        try:
            file, _ = split_slice(path)
        except UserError as error:
            return f"{flag} {error}"
        if file.suffix not in PROMPT_FILE_ENDINGS:
            return (
                f"{flag} {path} must be a .jsonl or .parquet file, such as a.jsonl, or rows of one, as a.jsonl@[0:100]"
            )
        return _file_problem(flag, path, file)


class ModelFolder(PathText):
    """A Hugging Face checkpoint."""

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        if not os.path.isdir(path):
            return f"{flag} {path} is not a folder here; download the model first, for example with `hf download`"
        if not os.access(os.path.join(path, "config.json"), os.R_OK):
            if os.path.isfile(os.path.join(path, MARKER)):
                return (
                    f"{flag} {path} is a folder of Megatron checkpoints; give the Hugging Face folder of the same model"
                )
            return f"{flag} {path} has no config.json that can be read: it is not a Hugging Face checkpoint"
        try:
            config = read_config_json(path)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return f"{flag} {path}/config.json is not valid JSON: {error}"
        if not isinstance(config, dict):
            return f"{flag} {path}/config.json holds no JSON object, but {config!r:.80}"
        return None


class LoadFolder(PathText):
    """A folder that is read where it is there, and may be missing yet."""

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        if not os.path.exists(path):
            return None
        if not os.path.isdir(path):
            return f"{flag} {path} is not a folder"
        return None if os.access(path, os.R_OK | os.X_OK) else f"{flag} {path} may not be read by this user"


class OutputFolder(PathText):
    """A folder that is made where it is missing. A part in braces becomes another text each time."""

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        return _output_problem(flag, path, _first_folder(path) if "{" in path else Path(path))


class OutputFile(PathText):
    """A file that is written, and its folder made where it is missing."""

    @classmethod
    def problem(cls, flag: str, path: str) -> str | None:
        return _output_problem(flag, path, _first_folder(path))


class InputTemplate(PathText):
    """Files that are read, a part of whose name stands in braces: a rule of the flag's own tries them."""


def _file_problem(flag: str, path: str, file: str | Path) -> str | None:
    if not os.path.isfile(file):
        return f"{flag} {path} is no file here; relative paths start at the working directory {Path.cwd()}"
    return None if os.access(file, os.R_OK) else f"{flag} {path} may not be read by this user"


def _first_folder(template: str) -> Path:
    """The folder of a file, before what stands in braces."""
    return Path(template.partition("{")[0] + "_").parent


def _output_problem(flag: str, path: str, folder: Path) -> str | None:
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"{flag} {path}: {there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{flag} {path}: {there} can't be written to (another user's, or read-only); give another folder"
    return None
