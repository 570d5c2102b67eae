"""Which of the generated groups make up a rollout, and what becomes of the others."""

from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.section import SameAs, Section


class CollectingConfig(Section):
    title: ClassVar[str] = "Collecting samples"

    over_sampling_batch_size: Annotated[int | None, SameAs("rollout_batch_size")] = Field(
        None,
        gt=0,
        description="Prompts asked for at once, at least --rollout-batch-size: the rollout ends when enough groups are "
        "kept. Unset: --rollout-batch-size.",
    )
    dynamic_sampling_filter_path: str | None = Field(
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
    partial_rollout: bool = Field(
        False,
        description="A response that the end of a rollout or new weights cut off is continued later. Without it, it is "
        "written anew.",
    )
    mask_offpolicy_in_partial_rollout: bool = Field(
        False, description="Train only on the tokens of a continued response that the newest weights wrote."
    )
    buffer_filter_path: str | None = Field(
        None,
        description="Function of (config, rollout_id, buffer, num_groups) by dotted path that takes the groups to go "
        "on with out of the buffer. Unset: the oldest first.",
    )
    max_weight_staleness: int | None = Field(
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
