"""Which of the generated groups make up a rollout, and what becomes of the others."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.effect import NO_SAMPLES, NotWith, OnlyWith, engines_run
from miles.config.paths import FunctionPath
from miles.config.section import SameAs, Section, rule, warning
from miles.config.values import Values

_NONZERO_STD = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_MAKES_ROLLOUTS = ("--rollout-function-path", "which makes the whole rollout")


def _asks_for_more(v: Values) -> bool:
    return v.needs_engines and v.over_sampling_batch_size > v.rollout_batch_size


class CollectingConfig(Section):
    title: ClassVar[str] = "Collecting samples"

    over_sampling_batch_size: Annotated[
        int | None,
        SameAs("rollout_batch_size"),
        NotWith(*_MAKES_ROLLOUTS, where=_asks_for_more),
        NotWith("--fully-async", "which keeps --async-max-concurrent-samples in flight", where=_asks_for_more),
    ] = Field(
        None,
        gt=0,
        description="Prompts asked for at once, at least --rollout-batch-size: the rollout ends when enough groups are "
        "kept. Unset: --rollout-batch-size.",
    )
    dynamic_sampling_filter_path: Annotated[FunctionPath | None, NotWith(*_MAKES_ROLLOUTS), NO_SAMPLES] = Field(
        None,
        description="Function of (config, samples) by dotted path that says whether a finished group is kept, such as "
        "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std.",
    )
    dynamic_sampling_max_batches: int = Field(
        20,
        gt=0,
        description="A rollout that has tried this many times --rollout-batch-size prompts, and still misses groups, "
        "stops the run.",
    )
    partial_rollout: Annotated[bool, NotWith(*_MAKES_ROLLOUTS, where=engines_run)] = Field(
        False,
        description="A response that the end of a rollout or new weights cut off is continued later. Without it, it is "
        "written anew.",
    )
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, OnlyWith("--partial-rollout", "by which responses are continued", where=engines_run)
    ] = Field(False, description="Train only on the tokens of a continued response that the newest weights wrote.")
    buffer_filter_path: Annotated[FunctionPath | None, NotWith(*_MAKES_ROLLOUTS), NO_SAMPLES] = Field(
        None,
        description="Function of (config, rollout_id, buffer, num_groups) by dotted path that takes the groups to go "
        "on with out of the buffer. Unset: the oldest first.",
    )
    max_weight_staleness: Annotated[int | None, NotWith(*_MAKES_ROLLOUTS, where=engines_run)] = Field(
        None,
        ge=0,
        description="A group with tokens of weights more than this many versions old is not trained on; its prompt is "
        "asked again. Unset: no limit.",
    )
    rollout_sample_retries: int = Field(
        2, ge=0, description="Times that a sample is generated again after its generation failed."
    )
    max_failed_sample_fraction: float = Field(
        0.05, ge=0, le=1, description="Share of a rollout's samples whose generation may fail before the run stops."
    )


@rule
def _enough_prompts(v: Values) -> Iterator[str]:
    asked, needed = v.over_sampling_batch_size, v.rollout_batch_size
    if v.needs_engines and asked < needed:
        yield (
            f"--over-sampling-batch-size {asked} is less than --rollout-batch-size {needed}: so few prompts never make "
            f"a rollout; give at least {needed}, or leave it out"
        )


@rule
def _equal_rewards(v: Values) -> Iterator[str]:
    if v.dynamic_sampling_filter_path != _NONZERO_STD or not v.needs_engines:
        return
    if v.n_samples_per_prompt == 1:
        yield (
            "--dynamic-sampling-filter-path check_reward_nonzero_std refuses every group of --n-samples-per-prompt 1; "
            "give at least 2, or drop it"
        )
    if not v.has_reward and v.use_opd:
        yield (
            "--dynamic-sampling-filter-path check_reward_nonzero_std refuses every group without a reward; give "
            "--rm-type or --custom-rm-path, or drop it"
        )


@warning
def _nothing_cut_off(v: Values) -> Iterator[str]:
    if v.partial_rollout and v.needs_engines and not v.fully_async and not _asks_for_more(v):
        yield (
            "--partial-rollout has no effect: no response is cut off without --fully-async, or an "
            f"--over-sampling-batch-size above --rollout-batch-size {v.rollout_batch_size}"
        )
