"""`--rm-type gemma_math`: mathematics of a Gemma model, which may think in a channel of its own before it answers.

A thought stands between <|channel> and <channel|>. Where the engine leaves special tokens out of the text
(--rollout-skip-special-tokens), nothing marks it, and the whole response is read, as with `math`.
"""

from typing import TYPE_CHECKING

from miles.rewards.math import check_installed, judge
from miles.rewards.math_text import read_label
from miles.rewards.reward import Reward, label_of

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

OPENING, CLOSING = "<|channel>", "<channel|>"


async def gemma_math_reward(config: "RunConfig", sample: "Sample") -> float:
    """1.0 if the last answer behind the last thought has the label's value, else 0.0.

    Which answer counts, and what is equal, is as with --rm-type math. A thought that is not closed has no answer.

    Raises:
        ValueError: the label can't be read as mathematics.
        MathTimeout: judging took too long.
    """
    label = label_of(sample)
    read_label(label)
    answer = sample.response.rpartition(CLOSING)[2]
    return 0.0 if OPENING in answer else await judge(label, answer)


GEMMA_MATH = Reward(
    name="gemma_math",
    help="math behind a Gemma's thought",
    judge=gemma_math_reward,
    read_label=read_label,
    check_machine=check_installed,
)
