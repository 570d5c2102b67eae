r"""`--rm-type deepscaler`: the mathematics of a model that thinks first, by the rule of DeepScaleR (Luo et al. 2025).

The response must close its thinking with </think>; the last \boxed behind it must have the label's value.
"""

import functools
import logging
from typing import TYPE_CHECKING

from miles.rewards.answers import after_thinking
from miles.rewards.math import check_installed, judge_box
from miles.rewards.math_text import read_label
from miles.rewards.reward import Reward, label_of

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

logger = logging.getLogger(__name__)


async def deepscaler_reward(config: "RunConfig", sample: "Sample") -> float:
    r"""1.0 if the last \boxed after the last </think> has the label's value, else 0.0.

    What is equal is as with --rm-type math.

    Raises:
        ValueError: the label can't be read as mathematics.
        MathTimeout: judging took too long.
    """
    answer = after_thinking(sample.response)
    if answer is None:
        _warn_of_no_thinking()
        return 0.0
    return await judge_box(label_of(sample), answer)


@functools.cache
def _warn_of_no_thinking() -> None:
    logger.warning(
        "--rm-type deepscaler: a response without </think> is worth 0, whatever its answer; for a model that does not "
        "think, or whose template opens and closes the thinking, take boxed_math"
    )


DEEPSCALER = Reward(
    name="deepscaler",
    help=r"math of the last \boxed after </think>",
    judge=deepscaler_reward,
    read_label=read_label,
    check_machine=check_installed,
)
