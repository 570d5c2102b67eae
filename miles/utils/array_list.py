"""Lists of numbers that are numpy arrays in memory: what a sample holds of its tokens."""

import operator
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np

from miles.utils.errors import UserError
from miles.utils.json_values import shown


def as_array(values: Any, what: str, dtype: type[np.generic], dims: tuple[str, ...] = ()) -> np.ndarray:
    """`values` as an array of one type. One that is so already is not copied.

    Args:
        values: a list, tuple, `ArrayList`, numpy array or torch tensor.
        what: it is, for messages.
        dtype: numpy's type of its numbers.
        dims: names of the dimensions of one entry; none where an entry is a number.

    Raises:
        UserError: it is something else, an integer type can't hold its numbers, or its entries differ in shape.
    """
    kinds = "biu" if np.issubdtype(dtype, np.integer) else "biuf"
    array = _read(values)
    if array is not None and not array.size:
        empty = (0,) * (1 + len(dims))
        array = array.astype(dtype) if array.ndim == len(empty) else np.empty(empty, dtype)
    if array is None or array.ndim != 1 + len(dims) or array.dtype.kind not in "biuf":
        raise _refused(values, what, dtype, dims)
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype)
    if kinds == "biu" and not np.array_equal(converted, array):
        raise _refused(values, what, dtype, dims)
    return converted


def _read(values: Any) -> np.ndarray | None:
    """What numpy makes of it; None if nothing."""
    if isinstance(values, str | bytes):
        return None
    try:
        # A tensor may be on a GPU, or of a type that numpy doesn't know.
        return np.asarray(values.tolist() if hasattr(values, "requires_grad") else values)
    except (ValueError, TypeError):
        return None


def _refused(values: Any, what: str, dtype: type[np.generic], dims: tuple[str, ...]) -> UserError:
    kind = "numbers"
    if np.issubdtype(dtype, np.integer):
        limits: Any = np.iinfo(dtype)
        kind = f"integers from {limits.min} to {limits.max}"
    entries = f", each entry of the shape [{', '.join(dims)}]" if dims else ""
    return UserError(f"{what} = {shown(values)}; it must be a list of {kind}{entries}")


class ArrayList(MutableSequence[Any]):
    """A list of numbers of one type in 1, 4 or 8 bytes each, which `array` holds.

    It compares, prints, adds up, is cut and is changed as the list of Python's numbers would be; numbers are rounded to
    its type first, and what its type can't hold is refused. Entries may be arrays of one shape instead: they read as
    nested lists. Pickled it is the array. JSON needs `tolist()`.

    Args:
        array: numbers or arrays, an entry for each index of its first dimension; not copied.
    """

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # To code that asks whether it has got a list, as tokenizers do, it is one.
        return list

    def tolist(self) -> list[Any]:
        """A new list of Python's numbers."""
        return self.array.tolist()

    def copy(self) -> "ArrayList":
        """One with the same entries, which changes of this one don't show in."""
        return ArrayList(self.array.copy())

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayList, (self.array,)

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list):
            return NotImplemented
        if len(other) != len(self):
            return False
        try:
            return np.array_equal(self.array, self._like(other)) or not len(self)
        except UserError:
            return False

    @overload
    def __getitem__(self, key: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> "ArrayList": ...
    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        if isinstance(key, slice):
            return ArrayList(self.array[key].copy())
        return self.array[operator.index(key)].tolist()

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            entries = self.tolist()
            entries[key] = value
            self.array = self._like(entries)
            return
        if not self.array.flags.writeable:  # out of Ray's store
            self.array = self.array.copy()
        self.array[operator.index(key)] = self._like([value])[0]

    def __delitem__(self, key: Any) -> None:
        self.array = np.delete(self.array, key, axis=0)

    def insert(self, index: SupportsIndex, value: Any) -> None:
        """Put an entry before the one at `index`."""
        place, _, _ = slice(index, None).indices(len(self))
        self.array = joined([self.array[:place], self._like([value]), self.array[place:]])

    def extend(self, values: Iterable[Any]) -> None:
        """Add entries at the end."""
        self.array = joined([self.array, self._like(values if isinstance(values, list | np.ndarray) else [*values])])

    def __iadd__(self, values: Iterable[Any]) -> "ArrayList":
        self.extend(values)
        return self

    def __add__(self, other: "list[Any] | ArrayList") -> "ArrayList":
        if not isinstance(other, list):
            return NotImplemented
        return ArrayList(joined([self.array, self._like(other)]))

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + self.tolist() if isinstance(other, list) else NotImplemented

    def __mul__(self, times: int) -> "ArrayList":
        if not isinstance(times, int):
            return NotImplemented
        return ArrayList(np.concatenate([self.array[:0], *[self.array] * times]))

    __rmul__ = __mul__

    def _like(self, values: Any) -> np.ndarray:
        dims = tuple(map(str, self.array.shape[1:]))
        return as_array(values, "an entry of a list of numbers", self.array.dtype.type, dims)


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One or more arrays end to end. Where entries are arrays themselves, one without any does not know their shape."""
    return np.concatenate([part for part in parts if len(part)] or parts[:1])
