r"""`--rm-type boxed_NAME`: the reward NAME of what the last \boxed{...} holds, instead of the whole response."""

import dataclasses
from typing import TYPE_CHECKING, Any

from miles.rewards.answers import last_box, unboxed
from miles.rewards.reward import Reward, label_of

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample


def boxed(reward: Reward) -> Reward:
    r"""A reward that sees only what the last \boxed or \fbox of the response holds; without one it is 0.0.

    Of a label that has a box, too, what that holds counts.

    Args:
        reward: one that compares with a label.
    """
    read_label = reward.read_label
    assert read_label is not None, f"{reward.name} compares with no label"

    async def boxed_reward(config: "RunConfig", sample: "Sample") -> Any:
        label, answer = unboxed(label_of(sample)), last_box(sample.response)
        if answer is None:
            return 0.0
        return await reward.judge(config, dataclasses.replace(sample, response=answer, label=label))

    return dataclasses.replace(
        reward,
        name=f"boxed_{reward.name}",
        help=rf"{reward.name} of what the last \boxed holds",
        judge=boxed_reward,
        read_label=lambda label: read_label(unboxed(label)),
    )
