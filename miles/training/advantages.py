"""Advantages from rewards. GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300): a reward against its group's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from miles.utils.types import Sample


def counted_rewards(samples: Sequence["Sample"]) -> list[float | None]:
    """The reward of each sample, None if it abstained or is removed: what `normalize_group_rewards` takes."""
    return [None if sample.remove_sample else sample.reward for sample in samples]


def normalize_group_rewards(rewards: Sequence[float | None], group_indices: Sequence[int], std: bool) -> np.ndarray:
    """Each reward minus the mean of its group and, with `std`, divided by the group's standard deviation + 1e-6.

    The deviation is the sample's (n - 1). A reward of None is no member of its group and comes out as 0. A group of one
    member, or of equal rewards, is all 0.

    Args:
        rewards: one a sample.
        group_indices: the group of each sample, in any order, in groups of any size.
        std: divide by the standard deviation (GRPO), or only subtract the mean (Dr. GRPO,
            https://arxiv.org/abs/2503.20783).

    Returns:
        float32 [samples].

    Raises:
        ValueError: a reward that is not finite, or counts that differ.
    """
    if len(rewards) != len(group_indices):
        raise ValueError(f"got {len(rewards)} rewards for {len(group_indices)} samples")
    member = np.array([reward is not None for reward in rewards], dtype=bool)
    values = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(
            f"{np.sum(~np.isfinite(values))} of {len(values)} rewards aren't finite; a reward function must return a "
            "finite number, or None to abstain"
        )
    result = np.zeros(len(rewards), dtype=np.float32)
    if len(values) == 0:
        return result
    _, group, counts = np.unique(np.asarray(group_indices)[member], return_inverse=True, return_counts=True)
    centred = values - (np.bincount(group, values) / counts)[group]
    if std:
        variance = np.bincount(group, centred**2) / np.maximum(counts - 1, 1)
        centred /= np.sqrt(variance)[group] + 1e-6
    # The mean of equal numbers is not always that number in floating point: compare them, not their deviations.
    lowest, highest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lowest, group, values)
    np.maximum.at(highest, group, values)
    result[member] = np.where((lowest == highest)[group], 0.0, centred)
    return result


def grpo_advantages(rewards_S: torch.Tensor, sample_N: torch.Tensor) -> torch.Tensor:
    """Every response token has its sample's normalised reward as advantage: [S] to [N]."""
    return rewards_S[sample_N]
