"""What is wrong with a path that was given, in one sentence; None if nothing is."""

import re
from pathlib import Path

from miles.utils.errors import UserError

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


def folder_problem(flag: str, folder: str) -> str | None:
    """Of a Hugging Face checkpoint."""
    if not Path(folder).is_dir():
        return f"{flag} {folder} is not a folder here; download the model first, for example with `hf download`"
    if not (Path(folder) / "config.json").is_file():
        return f"{flag} {folder} has no config.json: it is not a Hugging Face checkpoint"
    return None


def prompt_file_problem(flag: str, path: str) -> str | None:
    """Of a file of prompts, or a slice of one."""
    try:
        file, _ = split_slice(path)
    except ValueError as error:
        return f"{flag} {error}"
    if file.suffix not in (".jsonl", ".parquet"):
        return f"{flag} {path} must be a .jsonl or .parquet file, such as a.jsonl, or rows of one, as a.jsonl@[0:100]"
    if not file.is_file():
        return f"{flag} {path} is no file here; relative paths start at the working directory {Path.cwd()}"
    return None


def dotted_path_problem(flag: str, path: str, example: str) -> str | None:
    """Of the dotted path of a function; `example` is a right one."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return f"{flag} {path} must be the dotted path of a function, such as {example}"
    return None
