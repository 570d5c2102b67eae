"""Functions and classes of the user's own, named by a flag as package.module.name."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from miles.utils.errors import UserError


@functools.cache
def load_function(flag: str, path: str, *parameters: str, is_async: bool | None = False) -> Callable[..., Any]:
    """Import the function at a dotted path and check that it can be called.

    Args:
        flag: the flag that names it, for messages.
        path: package.module.function.
        *parameters: what it will be called with, in this order and without keywords; `name=` for one by keyword.
        is_async: whether it must be an `async def`, or must not; None: it may be either.

    Raises:
        ValueError: it can't be imported, is of the other kind, or doesn't take these parameters.
    """
    function = load_object(flag, path)
    name = path.rpartition(".")[2]
    wanted = f"({', '.join(parameters)})"
    if not callable(function) or inspect.isclass(function):
        kind = "is a class" if inspect.isclass(function) else f"is of type {type(function).__name__}"
        raise UserError(f"{flag} {path} {kind}; it must be a function {name}{wanted}")
    if is_async is not None and inspect.iscoroutinefunction(function) != is_async:
        must = "must be an async function: async def" if is_async else "must not be an async function: def"
        raise UserError(f"{flag} {path} {must} {name}{wanted}")
    _check_takes(flag, path, function, parameters)
    return function


@functools.cache
def load_class(flag: str, path: str, base: type, *parameters: str) -> type:
    """Import the class at a dotted path and check that it can take the place of `base`.

    Args:
        flag, path: as in `load_function`.
        base: the class that it must be derived from, with all that is abstract there written.
        *parameters: what its constructor will be called with, in this order and without keywords.

    Raises:
        ValueError: it can't be imported, is no such class, or its constructor doesn't take these parameters.
    """
    found = load_object(flag, path)
    if not inspect.isclass(found) or not issubclass(found, base):
        kind = "is another class" if inspect.isclass(found) else f"is of type {type(found).__name__}"
        raise UserError(f"{flag} {path} {kind}; it must be a class derived from {base.__module__}.{base.__qualname__}")
    if inspect.isabstract(found):
        raise UserError(f"{flag} {path} lacks what it must have: {', '.join(sorted(found.__abstractmethods__))}")
    _check_takes(flag, path, found, parameters)
    return found


def load_object(flag: str, path: str) -> Any:
    """Import whatever stands at a dotted path; ValueError if it can't be imported."""
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{flag} {path}: can't be imported ({error}); give package.module.name") from error


@contextmanager
def named_errors(flag: str) -> Iterator[None]:
    """Around a call of the user's function that `flag` names: what it raises becomes the cause of a RuntimeError."""
    try:
        yield
    # Foreign code raises anything, and a ValueError of its own is no message of Miles about a flag.
    except Exception as error:
        raise RuntimeError(f"what {flag} names failed: {type(error).__name__}: {error}") from error


def _check_takes(flag: str, path: str, function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    wanted = f"({', '.join(parameters)})"
    by_keyword = {name.removesuffix("=") for name in parameters if name.endswith("=")}
    signature = inspect.signature(function)
    try:
        signature.bind(*(name for name in parameters if not name.endswith("=")), **dict.fromkeys(by_keyword))
    except TypeError as error:
        raise UserError(f"{flag} {path} takes {signature}; it must take {wanted}") from error
