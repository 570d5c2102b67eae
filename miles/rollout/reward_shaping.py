"""Where a reward becomes what a sample is trained with, before tokens come in."""

from collections.abc import Sequence
from typing import cast

from miles.config import RunConfig
from miles.training.advantages.groups import counted_rewards, shape_rewards
from miles.utils.types import Sample


def shaped_rewards(config: RunConfig, samples: Sequence[Sample]) -> tuple[list[float | None], list[float]]:
    """What --advantage-estimator makes of the rewards of a rollout.

    Args:
        config: the run's configuration.
        samples: all samples of the rollout.

    Returns:
        The raw reward of each sample, None where it has none that counts, and the one that it is trained with.
    """
    raw = counted_rewards(samples)
    shaped = shape_rewards(
        config.estimator,
        raw,
        cast("list[int]", [sample.group_index for sample in samples]),
        cast("list[int]", [sample.trajectory for sample in samples]),
        compare=not config.disable_rewards_normalization,
        std=not config.disable_grpo_std_normalization,
    )
    return raw, shaped.tolist()
