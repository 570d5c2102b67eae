"""Where rewards come from."""

from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Section


class RewardConfig(Section):
    title: ClassVar[str] = "Reward"

    rm_type: Literal["exact", "math"] | None = Field(
        None,
        description="Built-in reward: exact compares the stripped response with the label, math compares values "
        "(package math-verify).",
    )
    custom_rm_path: str | None = Field(
        None,
        description="Your own reward instead, by dotted path: an async function of (config, sample) that returns a "
        "number, a dict of numbers, or None to abstain.",
    )
    reward_key: str | None = Field(None, description="The entry that trains, where the reward is a dict.")
    max_reward_error_fraction: float = Field(
        0.05, ge=0, le=1, description="Share of a rollout's samples whose reward may fail before the run stops."
    )
