"""`--custom-rm-path`: a reward of the user's own, `async def reward(config, sample) -> float | dict | None`."""

import asyncio
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from miles.config import RunConfig
from miles.utils.types import Sample

TIME_LIMIT_S = 300.0


@functools.cache
def load_custom_reward(path: str) -> Callable[[RunConfig, Sample], Awaitable[Any]]:
    """Import the function at a dotted path and check it; each call of the result ends within TIME_LIMIT_S seconds.

    Raises: ValueError if it can't be imported, is no async function, or doesn't take (config, sample).
    """
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--custom-rm-path {path}: can't be imported ({error}); give package.module.function"
        ) from error
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"--custom-rm-path {path} must be an async function: async def {name}(config, sample)")
    try:
        inspect.signature(function).bind("config", "sample")
    except TypeError as error:
        raise ValueError(
            f"--custom-rm-path {path} takes {inspect.signature(function)}; it must take (config, sample)"
        ) from error

    async def reward(config: RunConfig, sample: Sample) -> Any:
        async with asyncio.timeout(TIME_LIMIT_S):
            return await function(config, sample)

    return reward
