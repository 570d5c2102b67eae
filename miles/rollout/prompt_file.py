"""Reads .jsonl and .parquet files into rows, strictly: a bad row is reported with its place, never skipped."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHOWN_PROBLEMS = 10


class Number(str):
    """A JSON number as it is written in the file, so that a label keeps every digit."""


class BadRow(Exception):
    """What is wrong with one row; `raise_problems` turns the collected ones into one ValueError."""


def raise_problems(path: Path, problems: list[str]) -> None:
    """Raise one ValueError with the first ten problems (each starts with its file and line) and their number."""
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:SHOWN_PROBLEMS])
        rest = len(problems) - SHOWN_PROBLEMS
        more = f"\n  ... and {rest} more" if rest > 0 else ""
        raise ValueError(f"{path}: {len(problems)} unusable row(s); correct or remove them:\n{shown}{more}")


def read_rows(path: Path, columns: list[str]) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    """Yield (place, row) for every row; the place reads `file:line`, or `file:row n` for parquet, counted from 1.

    A jsonl file is UTF-8, with or without a byte order mark, and holds one JSON object a line; lines may end in CRLF;
    lines of white space only are passed over. Numbers come as `Number`. A row that cannot be read comes as a BadRow.
    Of a parquet file, those of `columns` that it has are read.

    Raises: ValueError if the file is missing or is neither .jsonl nor .parquet.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"prompt file {path}: the name ends in {path.suffix!r}; allowed are .jsonl and .parquet")
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist (working directory: {Path.cwd()})")
    return _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path, columns)


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                try:
                    yield place, _parse_line(line, "utf-8-sig" if number == 1 else "utf-8")
                except BadRow as problem:
                    yield place, problem


def _parse_line(line: bytes, encoding: str) -> dict[str, Any]:
    try:
        row = json.loads(
            line.decode(encoding),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_int=Number,
            parse_float=Number,
        )
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRow("JSON nested too deeply") from error
    if not isinstance(row, dict):
        kind = "number" if isinstance(row, Number) else type(row).__name__
        raise BadRow(f'a JSON object is needed, such as {{"input": ...}}; this is a {kind}')
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise BadRow(f"key(s) given twice: {', '.join(map(repr, repeated))}")
    return row


def _refuse_constant(literal: str) -> None:
    raise BadRow(f"{literal} is not valid JSON")


def _read_parquet(path: Path, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"prompt file {path} is not a parquet file: {error}") from error
    names = file.schema_arrow.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"prompt file {path}: column(s) present twice: {', '.join(map(repr, repeated))}")
    number = 0
    for batch in file.iter_batches(columns=[name for name in names if name in columns]):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}:row {number}", row
    assert number == file.metadata.num_rows, f"read {number} of {file.metadata.num_rows} rows of {path}"


def plain(value: Any) -> Any:
    """Turn every `Number` inside value into the int or float it writes.

    Raises: BadRow for a number that neither can hold (an int of over 4,300 digits, a float beyond 1.8e308).
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, Number):
        return value
    try:
        number = int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError as error:
        raise BadRow(f"a number of {len(value)} digits: write it as a string") from error
    if isinstance(number, float) and not math.isfinite(number):
        raise BadRow(f"the number {value} is too large for a float: write it as a string")
    return number
