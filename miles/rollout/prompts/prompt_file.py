"""Reads .jsonl and .parquet files into rows, strictly: a bad row is reported with its place, never skipped.

A file is gone through once, row by row, and rows are read again by their key when they are needed, so that nothing of
it stays in memory but, of a parquet file, the row group that was read last.
"""

import bisect
import codecs
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from miles.utils.errors import UserError

SHOWN_PROBLEMS = 10
ROWS_AT_ONCE = 64


class Number(str):
    """A JSON number as it is written in the file, so that a label keeps every digit."""


class BadRow(Exception):
    """What is wrong with one row; `Problems` turns them into one ValueError."""


class Row(NamedTuple):
    """A row, or what is wrong with it, where it stands (`file:line`, or `file:row n`, from 1), and its key."""

    place: str
    key: int
    content: dict[str, Any] | BadRow


class Problems:
    """Unusable rows of one file: the first ten and their number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown: list[str] = []
        self.count = 0

    def add(self, place: str, problem: object) -> None:
        """The row at `place` cannot be used."""
        self.count += 1
        if self.count <= SHOWN_PROBLEMS:
            self._shown.append(f"\n  {place}: {problem}")

    def check(self) -> None:
        """Raise one ValueError if there was a problem."""
        if self.count:
            rest = self.count - SHOWN_PROBLEMS
            more = f"\n  ... and {rest} more" if rest > 0 else ""
            raise UserError(
                f"{self._path}: {self.count} unusable row(s); correct or remove them:{''.join(self._shown)}{more}"
            )


class _PromptFile:
    """A file that stays open; a file that takes its place later is not seen, one that is written to is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self._state = self._stat()

    def _stat(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def _check_unchanged(self) -> None:
        if self._stat() != self._state:
            raise UserError(f"prompt file {self.path} was written to while the run reads it: start again")

    def sha256(self) -> str:
        """Of the file's bytes."""
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._check_unchanged()
        return digest


class JsonlFile(_PromptFile):
    """UTF-8, with or without a byte order mark, a JSON object a line.

    Lines may end in CRLF; blank ones are no rows. Numbers come as `Number`. The key of a row is the byte at which its
    line begins.
    """

    def scan(self, rows: slice = slice(None)) -> Iterator[Row]:
        """Yield the rows that a slice without a step takes; those before are not parsed, those behind not read."""
        start, stop = rows.start or 0, rows.stop
        if start < 0 or (stop is not None and stop < 0):
            start, stop, _ = rows.indices(sum(1 for _ in self._lines()))
        for place, key, line in itertools.islice(self._lines(), start, stop):
            yield Row(place, key, _parsed(line))

    def read(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of `keys`, in their order.

        Raises: RuntimeError if the file has been written to.
        """
        self._check_unchanged()
        rows = []
        for key in keys:
            self._file.seek(key)
            row = _parsed(self._file.readline())
            assert not isinstance(row, BadRow), f"byte {key} of {self.path}: {row}"
            rows.append(row)
        return rows

    def _lines(self) -> Iterator[tuple[str, int, bytes]]:
        self._file.seek(0)
        key = 0
        for number, line in enumerate(self._file, start=1):
            if line.removeprefix(codecs.BOM_UTF8 if key == 0 else b"").strip():
                yield f"{self.path}:{number}", key, line
            key += len(line)


class ParquetFile(_PromptFile):
    """A parquet file, of which those of `columns` that it has are read. The key of a row is its number from 0.

    Columns of objects give every object all keys that occur anywhere, with null where one had no such key: inside
    lists such a key is taken away again, but for the content of a message.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        super().__init__(path)
        try:
            self._parquet = pyarrow.parquet.ParquetFile(self._file)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"prompt file {path} is not a parquet file: {error}") from error
        names = self._parquet.schema_arrow.names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(f"prompt file {path}: column(s) present twice: {', '.join(map(repr, repeated))}")
        self._columns = [name for name in names if name in columns]
        if not self._columns:
            raise UserError(
                f"prompt file {path} has none of the columns {', '.join(columns)}; it has {', '.join(names)}"
            )
        metadata = self._parquet.metadata
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._group, self._table = -1, pyarrow.table({})

    def scan(self, rows: slice = slice(None)) -> Iterator[Row]:
        """Yield the rows that a slice without a step takes; row groups without any of them are not read."""
        start, stop, _ = rows.indices(self._starts[-1])
        for group, (number, end) in enumerate(itertools.pairwise(self._starts)):
            if end <= start or stop <= number:
                continue
            for batch in self._parquet.iter_batches(ROWS_AT_ONCE, [group], self._columns):
                first, last = max(start - number, 0), min(stop - number, batch.num_rows)
                if first < last:
                    for key, row in enumerate(_rows(batch.slice(first, last - first)), start=number + first):
                        yield Row(f"{self.path}:row {key + 1}", key, row)
                number += batch.num_rows
            assert number == end, f"rows {number} to {end} of {self.path} are missing"

    def read(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of `keys`, in their order; each row group that holds any is read once.

        Raises: RuntimeError if the file has been written to.
        """
        self._check_unchanged()
        rows: dict[int, dict[str, Any]] = {}
        for key in sorted(set(keys)):
            group = bisect.bisect_right(self._starts, key) - 1
            if group != self._group:
                self._group, self._table = group, self._parquet.read_row_group(group, self._columns)
            (rows[key],) = _rows(self._table.slice(key - self._starts[group], 1))
        return [rows[key] for key in keys]


def open_prompt_file(path: Path, columns: Sequence[str]) -> JsonlFile | ParquetFile:
    """Open a prompt file, of which `columns` are wanted.

    Raises: ValueError if the file is missing, is neither .jsonl nor .parquet, or has none of the columns.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"prompt file {path}: the name ends in {path.suffix!r}; allowed are .jsonl and .parquet")
    if not path.is_file():
        raise UserError(f"prompt file {path} does not exist (working directory: {Path.cwd()})")
    return JsonlFile(path) if path.suffix == ".jsonl" else ParquetFile(path, columns)


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        return _parse(line)
    except BadRow as problem:
        return problem


def _parse(line: bytes) -> dict[str, Any]:
    try:
        # The byte order mark stands in the first line, and in others where files were put together.
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: {error}") from error
    if not isinstance(row, dict):
        kind = "number" if isinstance(row, Number) else type(row).__name__
        raise BadRow(f'a JSON object is needed, such as {{"input": ...}}; this is a {kind}')
    return row


def parse_json(text: str) -> Any:
    """What `text` holds as JSON, with numbers as `Number`.

    Raises: BadRow if it isn't JSON, or an object has a key twice.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_int=Number,
            parse_float=Number,
        )
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise BadRow("JSON nested too deeply") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise BadRow(f"key(s) given twice: {', '.join(map(repr, repeated))}")
    return row


def _refuse_constant(literal: str) -> None:
    raise BadRow(f"{literal} is not valid JSON")


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    for row in table.to_pylist(maps_as_pydicts="strict"):
        yield {name: _without_nulls(value) if isinstance(value, list) else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        kept = {"content"} if "role" in value else set()
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key in kept}
    return value


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
