"""Rewards and the group that each belongs to. M is the number of group members: rollouts whose reward counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.utils.types import Sample


def counted_rewards(samples: Sequence["Sample"]) -> list[float | None]:
    """The reward of each sample, None if it abstained or is removed: what `shape_rewards` takes."""
    return [None if sample.remove_sample else sample.reward for sample in samples]


@dataclass(frozen=True)
class Groups:
    """The members of all groups, in any order, and what a reward is compared with.

    Args:
        rewards_M: float64 [M], the members' rewards, finite.
        group_M: int64 [M], the group of each, numbered from 0 without gaps.
    """

    rewards_M: np.ndarray
    group_M: np.ndarray

    @property
    def sizes_M(self) -> np.ndarray:
        """How many members each one's group has: int64 [M]."""
        return np.bincount(self.group_M)[self.group_M]

    def mean(self, x_M: np.ndarray) -> np.ndarray:
        """The mean of x over each member's group: float64 [M]."""
        return (np.bincount(self.group_M, x_M) / np.bincount(self.group_M))[self.group_M]

    def centred(self) -> np.ndarray:
        """Each reward minus the mean of its group, and exactly 0 where all its members' are equal: float64 [M]."""
        # The mean of equal numbers is not always that number in floating point: compare them, not their deviations.
        lowest = np.full(self.group_M.max(initial=-1) + 1, np.inf)
        highest = -lowest
        np.minimum.at(lowest, self.group_M, self.rewards_M)
        np.maximum.at(highest, self.group_M, self.rewards_M)
        return np.where((lowest == highest)[self.group_M], 0.0, self.rewards_M - self.mean(self.rewards_M))


@dataclass(frozen=True)
class Members:
    """Which sample is a piece of which member.

    Args:
        groups: the members.
        member_S: int64 [S], the member of each sample, -1 for one without a reward.
    """

    groups: Groups
    member_S: np.ndarray

    def spread(self, x_M: np.ndarray) -> np.ndarray:
        """What its member has to each sample, 0 to one without a reward: float32 [S]."""
        return np.append(x_M, 0.0)[self.member_S].astype(np.float32)  # -1 is the last, the 0


def members_of(rewards: Sequence[float | None], group_indices: Sequence[int], rollout_ids: Sequence[int]) -> Members:
    """Samples with the same `rollout_id` are pieces of one trajectory: one member of their group.

    Pieces whose reward is None take no part; a rollout of only such pieces is no member.

    Raises:
        ValueError: counts that differ, a reward that is not finite, or pieces of one rollout with different rewards or
            groups.
    """
    if not len(rewards) == len(group_indices) == len(rollout_ids):
        raise ValueError(f"got {len(rewards)} rewards, {len(group_indices)} groups, {len(rollout_ids)} rollout ids")
    counts_S = np.array([reward is not None for reward in rewards], dtype=bool)
    values = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not np.isfinite(values).all():
        raise UserError(
            f"{np.sum(~np.isfinite(values))} of {len(values)} rewards aren't finite; a reward function must return a "
            "finite number, or None to abstain"
        )
    group_ids = np.asarray(group_indices, dtype=np.int64)[counts_S]
    rollouts = np.asarray(rollout_ids, dtype=np.int64)[counts_S]
    _, first, member = np.unique(rollouts, return_index=True, return_inverse=True)
    for name, column in (("reward", values), ("group", group_ids)):
        differs = np.flatnonzero(column != column[first][member])
        if len(differs):
            rollout = rollouts[differs[0]]
            raise UserError(
                f"rollout {rollout}: its {np.sum(rollouts == rollout)} samples have the {name}s "
                f"{sorted(set(column[rollouts == rollout].tolist()))}; they are pieces of one trajectory and need the "
                f"same {name} ({len(set(rollouts[differs].tolist()))} rollouts are like this)"
            )
    _, group_M = np.unique(group_ids[first], return_inverse=True)
    member_S = np.full(len(rewards), -1, dtype=np.int64)
    member_S[counts_S] = member
    return Members(Groups(values[first], group_M), member_S)
