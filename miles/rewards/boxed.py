r"""`--rm-type boxed_NAME`: the reward NAME of what the last \boxed{...} holds, instead of the whole response."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from miles.config import RunConfig
from miles.rewards.answers import last_box, unboxed
from miles.utils.types import Sample


def boxed(reward: Callable[[RunConfig, Sample], Awaitable[Any]]) -> Callable[[RunConfig, Sample], Awaitable[Any]]:
    r"""A reward that sees only what the last \boxed or \fbox of the response holds; without one it is 0.0.

    Of a label that has a box, too, what that holds counts.
    """

    async def boxed_reward(config: RunConfig, sample: Sample) -> Any:
        label, answer = unboxed(sample.label), last_box(sample.response)
        if answer is None:
            return 0.0
        return await reward(config, dataclasses.replace(sample, response=answer, label=label))

    return boxed_reward
