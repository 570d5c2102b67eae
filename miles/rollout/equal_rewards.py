"""When two rewards are the same.

Rewards are added up from parts, in float32 or float64 and in any order: 0.1 + 0.2 is not 0.3. What differs by a few
roundings of float32 is the same.
"""

import math
from collections.abc import Sequence

from miles.utils.errors import UserError

RELATIVE = 1e-6  # of the larger one; a rounding of float32 is up to 6e-8 of it
# 0.1 + 0.2 - 0.3 is not 0. Of so small a difference GRPO leaves little: it adds 1e-6 to the deviation it divides by.
ABSOLUTE = 1e-7


def same_reward(a: float, b: float) -> bool:
    """Whether two rewards are the same but for rounding. Raises: ValueError if one is not finite."""
    return all_same([a, b])


def all_same(rewards: Sequence[float]) -> bool:
    """Whether at least one reward is given and all are the same but for rounding, in whatever order they come.

    Raises:
        ValueError: one is not finite.
    """
    if strange := [reward for reward in rewards if not math.isfinite(reward)]:
        raise UserError(f"a reward is {strange[0]} (of {len(rewards)}); it must be a finite number, or None to abstain")
    if not rewards:
        return False
    low, high = min(rewards), max(rewards)
    return high - low <= max(ABSOLUTE, RELATIVE * max(abs(low), abs(high)))


def rounded(reward: float) -> float:
    """To one decimal, for names of metrics and reasons; never -0.0."""
    return round(reward, 1) + 0.0
