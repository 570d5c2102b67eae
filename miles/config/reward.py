"""Where rewards come from."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.section import SameAs, Section

# Those that compare nothing with a label.
WITHOUT_LABEL = ("remote_rm", "reasoning_gym")


class RewardConfig(Section):
    title: ClassVar[str] = "Reward"

    rm_type: (
        Literal[
            "exact",
            "math",
            "dapo",
            "deepscaler",
            "f1",
            "gpqa",
            "code",
            "remote_rm",
            "reasoning_gym",
            "boxed_exact",
            "boxed_math",
            "boxed_f1",
            "boxed_gpqa",
        ]
        | None
    ) = Field(
        None,
        description="Built-in reward; a sample whose metadata has rm_type takes that one. exact: the stripped response "
        "is the label. math: it has the label's value (package math-verify). boxed_NAME: NAME of what the last \\boxed "
        "holds. dapo: 1 or -1 for what follows Answer:. deepscaler: math of the last \\boxed after </think>. f1: words "
        "in common. gpqa: the letter of a choice. code: a Python program passes the label's tests. remote_rm: --rm-url "
        "is asked. reasoning_gym: the task of the row scores it.",
    )
    rm_url: str | None = Field(
        None,
        description="http://... or https://...: where remote_rm posts {prompt, response, label} as JSON, for a number, "
        "an object of numbers, or null.",
    )
    rm_request_timeout: float = Field(120.0, gt=0, description="Seconds that one request of remote_rm may take.")
    rm_request_retries: int = Field(
        3, ge=0, description="Further attempts of a request of remote_rm: lost connection, cut body, timeout, 5xx, 429."
    )
    rm_max_concurrency: int = Field(64, gt=0, description="Requests of remote_rm in flight at most.")
    custom_rm_path: str | None = Field(
        None,
        description="Your own reward instead, by dotted path: a function of (config, sample), async or not, that "
        "returns a number, a dict of numbers, or None to abstain.",
    )
    group_rm: bool = Field(
        False,
        description="--custom-rm-path is a function of (config, samples): the samples of one prompt, for a list of "
        "as many rewards.",
    )
    reward_key: str | None = Field(None, description="The entry that trains, where the reward is a dict.")
    eval_reward_key: Annotated[str | None, SameAs("reward_key")] = Field(
        None, description="The entry that evaluation shows, where the reward is a dict. Unset: --reward-key."
    )
    max_reward_error_fraction: float = Field(
        0.05, ge=0, le=1, description="Share of a rollout's samples whose reward may fail before the run stops."
    )
