"""All built-in rewards."""

from miles.rewards.boxed import boxed
from miles.rewards.code import CODE
from miles.rewards.dapo import DAPO
from miles.rewards.deepscaler import DEEPSCALER
from miles.rewards.exact import EXACT
from miles.rewards.f1 import F1
from miles.rewards.gemma_math import GEMMA_MATH
from miles.rewards.gpqa import GPQA
from miles.rewards.math import BOXED_MATH, MATH
from miles.rewards.reasoning_gym import REASONING_GYM
from miles.rewards.remote_rm import REMOTE_RM
from miles.rewards.reward import Reward
from miles.utils.errors import UserError

# In the order in which people read them.
_RECORDS = (
    *(EXACT, MATH, DAPO, DEEPSCALER, GEMMA_MATH, F1, GPQA, CODE, REMOTE_RM, REASONING_GYM),
    *(boxed(EXACT), BOXED_MATH, boxed(F1), boxed(GPQA)),
)
BUILT_IN: dict[str, Reward] = {reward.name: reward for reward in _RECORDS}


def built_in(name: object) -> Reward:
    """The reward that metadata names.

    Raises:
        UserError: there is none of that name.
    """
    if not isinstance(name, str) or name not in BUILT_IN:
        raise UserError(f"metadata names the reward {name!r}; it must be one of {', '.join(BUILT_IN)}")
    return BUILT_IN[name]
