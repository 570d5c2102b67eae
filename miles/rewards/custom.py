"""`--custom-rm-path`: a reward of the user's own, `async def reward(config, sample) -> float | dict | None`.

With `--group-rm` it is `async def reward(config, samples) -> list[float | dict | None]`, for the samples of one prompt.
Without `async` it runs in a thread.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from miles.utils.dotted_path import load_function

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

TIME_LIMIT_S = 300.0


def load_custom_reward(path: str) -> Callable[["RunConfig", "Sample"], Awaitable[Any]]:
    """Import the function at a dotted path and check it; each call of the result ends within TIME_LIMIT_S seconds.

    Raises:
        ValueError: it can't be imported or doesn't take (config, sample).
    """
    return load_function("--custom-rm-path", path, "config", "sample", is_async=None, limit_s=TIME_LIMIT_S)


def load_custom_group_reward(path: str) -> Callable[["RunConfig", list["Sample"]], Awaitable[Any]]:
    """`load_custom_reward` of a function of (config, samples)."""
    return load_function("--custom-rm-path", path, "config", "samples", is_async=None, limit_s=TIME_LIMIT_S)
