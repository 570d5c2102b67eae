"""Functions and classes of the user's own, named by a flag as package.module.name."""

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from miles.utils.errors import UserError
from miles.utils.user_code import guarded

# By module, the flag and path of each thing in it that was loaded.
_LOADED: dict[str, set[str]] = {}


@functools.cache
def load_function(
    flag: str, path: str, *parameters: str, is_async: bool | None = False, limit_s: float | None = None
) -> Callable[..., Any]:
    """Import the function at a dotted path and check that it can be called.

    Calls of what is returned fail with FunctionFailed, that has flag and path (`miles.utils.user_code.guarded`).

    Args:
        flag: the flag that names it, for messages.
        path: package.module.function.
        *parameters: what it will be called with, in this order and without keywords; `name=` for one by keyword.
        is_async: whether it must be an `async def`, or must not; None: it may be either, and is awaited: a plain one
            runs in a thread.
        limit_s: seconds that a call which is awaited may take.

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
    return guarded(f"{flag} {path}", function, in_thread=is_async is None, limit_s=limit_s)


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
    chosen = load_object(flag, path)
    if not inspect.isclass(chosen) or not issubclass(chosen, base):
        kind = "is another class" if inspect.isclass(chosen) else f"is of type {type(chosen).__name__}"
        raise UserError(f"{flag} {path} {kind}; it must be a class derived from {base.__module__}.{base.__qualname__}")
    if inspect.isabstract(chosen):
        raise UserError(f"{flag} {path} lacks what it must have: {', '.join(sorted(chosen.__abstractmethods__))}")  # type: ignore[attr-defined]
    _check_takes(flag, path, chosen, parameters)
    return chosen


def load_object(flag: str, path: str) -> Any:
    """Import whatever stands at a dotted path; ValueError if it can't be imported."""
    module_name, _, name = path.rpartition(".")
    try:
        value = getattr(importlib.import_module(module_name), name)
    # A module of the user's may raise anything, and end the process, as it is imported.
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag} {path}: can't be imported ({_reason(error)}); give package.module.name") from error
    # A package may only hand on what another module holds.
    for module in {module_name, getattr(value, "__module__", module_name)}:
        _LOADED.setdefault(module, set()).add(f"{flag} {path}")
    return value


def loaded_in(frame: FrameType | None) -> str | None:
    """Flag and path of what the innermost frame of a user's module, from `frame` outwards, is of; None: there is none.

    Of several that were loaded from that module all are named, unless one of them is on the stack itself.
    """
    named: set[str] = set()
    while frame is not None:
        loaded = _LOADED.get(frame.f_globals.get("__name__", ""), set())
        name_there = frame.f_code.co_qualname.partition(".")[0]
        if exact := {name for name in loaded if name.rpartition(".")[2] == name_there}:
            named = exact
            break
        named = named or loaded
        frame = frame.f_back
    return ", ".join(sorted(named)) or None


def _reason(error: BaseException) -> str:
    """What an import failed of: with the line of the module that is to blame, unless something is only not there."""
    if isinstance(error, ImportError | AttributeError) or not str(error).strip():
        text = str(error) or type(error).__name__
    else:
        text = f"{type(error).__name__}: {error}"
    places = [place for place in traceback.extract_tb(error.__traceback__) if "importlib" not in place.filename]
    if len(places) < 2 or isinstance(error, SyntaxError):  # it failed here; a SyntaxError names its own line
        return text
    return f"{text}; {places[-1].filename}:{places[-1].lineno}"


def _check_takes(flag: str, path: str, function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    wanted = f"({', '.join(parameters)})"
    by_keyword = {name.removesuffix("=") for name in parameters if name.endswith("=")}
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UserError(f"{flag} {path}: {error}; give a function of Python that takes {wanted}") from error
    try:
        signature.bind(*(name for name in parameters if not name.endswith("=")), **dict.fromkeys(by_keyword))
    except TypeError as error:
        raise UserError(f"{flag} {path} takes {signature}; it must take {wanted}") from error
