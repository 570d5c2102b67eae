"""Rewards and the group that each belongs to. M is the number of group members: rollouts whose reward counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles.training.advantages.estimator import Estimator
from miles.utils.errors import UserError
from miles.utils.types import Sample

# Added to a standard deviation that something is divided by.
EPSILON = 1e-6


def counted_rewards(samples: Sequence[Sample]) -> list[float | None]:
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

    def deviations(self) -> np.ndarray:
        """The standard deviation of each member's group, its squares divided by n - 1; 0 for one: float64 [M]."""
        squares_M = np.bincount(self.group_M, self.centred() ** 2)[self.group_M]
        return np.sqrt(squares_M / np.maximum(self.sizes_M - 1, 1))


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


def shape_rewards(
    estimator: Estimator,
    rewards: Sequence[float | None],
    group_indices: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    compare: bool = True,
    std: bool = True,
) -> np.ndarray:
    """What an estimator makes of the rewards before tokens come in: float32 [S].

    Samples with the same `rollout_id` are pieces of one trajectory: they count once in their group, and each gets the
    same result. A reward of None is no member of its group and comes out as 0.

    Args:
        estimator: that of the run.
        rewards: one a sample; None abstains.
        group_indices: the group of each sample, in any order, in groups of any size.
        rollout_ids: the rollout of each sample.
        compare: compare rewards within their groups, in the estimators that do; else rewards stay as they are.
        std: divide by the group's standard deviation, in the estimators that do.

    Raises:
        ValueError: counts that differ, a reward that is not finite, or pieces of one rollout with different rewards or
            groups.
    """
    members = members_of(rewards, group_indices, rollout_ids)
    groups = members.groups
    if estimator.compare is None or not compare:
        return members.spread(groups.rewards_M)
    shaped_M = estimator.compare(groups)
    if estimator.divides_by_std and std:
        shaped_M = shaped_M / (groups.deviations() + EPSILON)
    return members.spread(shaped_M)
