"""What a checkpoint keeps of a rollout: the position in the prompts, samples in flight, the version of the weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.utils.checkpoint_folder import DATA_FILE, SAMPLES_FILE
from miles.utils.disk import writing
from miles.utils.errors import UserError


def write_state(folder: Path, state: dict[str, Any], version: int) -> None:
    """Write both files into `folder`.

    Args:
        state: {"data": the data source's, "collector": the collector's, or None where there is none}.
        version: of the engines' weights.

    Raises:
        ValueError: a user's data source, or the metadata of a sample, holds what JSON does not.
    """
    samples = {"weight_version": version, "collector": state["collector"]}
    with writing("--save", folder):
        _write(Path(folder) / DATA_FILE, _in_parts(state["data"], 0))
        # A group at a time: json.dumps of all would let nothing else in this process run for seconds.
        _write(Path(folder) / SAMPLES_FILE, _in_parts(samples, 3))


def read_state(folder: Path) -> tuple[dict[str, Any], int]:
    """The state and the version that `write_state` was given.

    Raises:
        ValueError: a file is missing or broken.
    """
    data, samples = (_read(Path(folder) / name) for name in (DATA_FILE, SAMPLES_FILE))
    return {"data": data, "collector": samples["collector"]}, samples["weight_version"]


def _write(path: Path, parts: Iterator[str]) -> None:
    try:
        with path.open("w") as file:
            file.writelines(parts)
    except TypeError as error:
        raise UserError(
            f"{path} can't be written as JSON ({error}): the metadata of samples, and the state of a data source, may "
            "hold numbers, texts, lists and objects of Python only"
        ) from error


def _in_parts(value: Any, depth: int) -> Iterator[str]:
    """JSON of a value, what is `depth` levels below it in one part each."""
    if depth == 0 or not isinstance(value, dict | list):
        yield json.dumps(value)
        return
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    yield "{" if isinstance(value, dict) else "["
    for place, (name, item) in enumerate(pairs):
        yield (", " if place else "") + ("" if name is None else json.dumps(name) + ": ")
        yield from _in_parts(item, depth - 1)
    yield "}" if isinstance(value, dict) else "]"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} can't be read ({error}): the checkpoint is not whole; load another one") from error
