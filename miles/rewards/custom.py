"""`--custom-rm-path`: a reward of the user's own, `async def reward(config, sample) -> float | dict | None`.

With `--group-rm` it is `async def reward(config, samples) -> list[float | dict | None]`, for the samples of one prompt.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from miles.config import RunConfig
from miles.utils.dotted_path import load_function
from miles.utils.types import Sample

TIME_LIMIT_S = 300.0


@functools.cache
def load_custom_reward(path: str) -> Callable[[RunConfig, Sample], Awaitable[Any]]:
    """Import the function at a dotted path and check it; each call of the result ends within TIME_LIMIT_S seconds.

    Raises: ValueError if it can't be imported, is no async function, or doesn't take (config, sample).
    """
    return _in_time(load_function("--custom-rm-path", path, "config", "sample", is_async=True))


@functools.cache
def load_custom_group_reward(path: str) -> Callable[[RunConfig, list[Sample]], Awaitable[Any]]:
    """`load_custom_reward` of a function of (config, samples)."""
    return _in_time(load_function("--custom-rm-path", path, "config", "samples", is_async=True))


def _in_time(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def reward(config: RunConfig, asked: Sample | list[Sample]) -> Any:
        async with asyncio.timeout(TIME_LIMIT_S):
            return await function(config, asked)

    return reward
