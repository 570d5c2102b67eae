"""What JSON has a form for: the border where values of foreign code enter what is saved."""

from collections.abc import Mapping
from typing import Any

from miles.utils.errors import UserError

_PLAIN = frozenset((str, int, float, bool, type(None)))


def as_json(value: Any, what: str) -> Any:
    """`value` as JSON holds it: numpy's and torch's scalars and arrays become numbers and lists, tuples lists.

    Lists and dicts are new ones, but for a list that holds nothing but numbers, texts and None.

    Raises:
        ValueError: of something else, at `what` and the keys that lead to it; or it holds itself.
    """
    try:
        return _converted(value, what, ())
    except RecursionError as error:
        raise UserError(f"{what} holds itself, or is too deep for JSON") from error


def json_entries(values: Mapping[Any, Any], what: str) -> tuple[dict[Any, Any], str | None]:
    """`as_json` of those entries that have such a form, and what is wrong with the first of the others, or None."""
    entries: dict[Any, Any] = {}
    problem: str | None = None
    for key, value in values.items():
        try:
            entries |= as_json({key: value}, what)
        except UserError as error:
            problem = problem or str(error)
    return entries, problem


def scalar(value: Any) -> Any:
    """A number of numpy's or torch's, in an array perhaps, as Python's; anything else as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # an array of several
        return value


def shown(value: Any) -> str:
    """A value and its type, as messages show them."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"


def _converted(value: Any, what: str, keys: tuple[Any, ...]) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch
        try:
            value = value.tolist()
        except RuntimeError as error:  # a tensor without contents, or with another layout
            raise UserError(f"{_at(what, keys)} gives no list: {error}") from error
    if isinstance(value, dict):
        return {_key(key, what, keys): _converted(item, what, (*keys, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= _PLAIN:
            return value if isinstance(value, list) else list(value)
        return [_converted(item, what, (*keys, place)) for place, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(
        f"{_at(what, keys)} is {shown(value)}, which JSON has no form for, so that it can't be saved; give numbers, "
        "texts, lists and dicts"
    )


def _key(key: Any, what: str, keys: tuple[Any, ...]) -> Any:
    key = scalar(key)
    if key is not None and not isinstance(key, str | int | float):
        raise UserError(f"{_at(what, keys)} has the key {shown(key)}; JSON's keys are texts and numbers")
    return key


def _at(what: str, keys: tuple[Any, ...]) -> str:
    return what + "".join(f"[{key!r}]" for key in keys)
