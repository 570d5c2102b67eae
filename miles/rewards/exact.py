"""`--rm-type exact`: the answer, character for character."""

from typing import TYPE_CHECKING

from miles.rewards.reward import Reward, label_of
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample


async def exact_reward(config: "RunConfig", sample: "Sample") -> float:
    """1.0 if the response was completed and, white space around it aside, equals the label; else 0.0.

    Raises:
        ValueError: the label is empty.
    """
    completed = sample.status == sample.Status.COMPLETED
    return float(completed and sample.response.strip() == read_label(label_of(sample)))


def read_label(label: str) -> str:
    """The label without white space around it.

    Raises:
        ValueError: nothing is left.
    """
    if not label.strip():
        raise UserError(f"the label {label!r} is empty: nothing would be right")
    return label.strip()


EXACT = Reward(name="exact", help="the stripped response is the label", judge=exact_reward, read_label=read_label)
