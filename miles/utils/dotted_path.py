"""Functions of the user's own, named by a flag as package.module.function."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def load_function(flag: str, path: str, *parameters: str, is_async: bool = False) -> Callable[..., Any]:
    """Import the function at a dotted path and check that it can be called.

    Args:
        flag: the flag that names it, for messages.
        path: package.module.function.
        *parameters: what it will be called with, in this order and without keywords.
        is_async: whether it must be an `async def`, or must not.

    Raises:
        ValueError: it can't be imported, is of the other kind, or doesn't take these parameters.
    """
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{flag} {path}: can't be imported ({error}); give package.module.function") from error
    wanted = f"({', '.join(parameters)})"
    if not callable(function):
        raise ValueError(f"{flag} {path} is of type {type(function).__name__}; it must be a function {name}{wanted}")
    if inspect.iscoroutinefunction(function) != is_async:
        must = "must be an async function: async def" if is_async else "must not be an async function: def"
        raise ValueError(f"{flag} {path} {must} {name}{wanted}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ValueError(f"{flag} {path} takes {inspect.signature(function)}; it must take {wanted}") from error
    return function
