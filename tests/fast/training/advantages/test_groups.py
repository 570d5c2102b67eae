import time

import numpy as np
import pytest

from miles.training.advantages import ESTIMATORS
from miles.training.advantages.groups import Groups, counted_rewards, members_of, shape_rewards
from miles.utils.types import Sample

GROUPED = ["grpo", "gspo", "cispo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]
RAW = ["reinforce_plus_plus", "ppo"]


def shape(estimator, rewards, groups, rollouts=None, std=True):
    rollouts = range(len(rewards)) if rollouts is None else rollouts
    shaped = shape_rewards(ESTIMATORS[estimator], rewards, groups, rollouts, std=std)
    assert shaped.dtype == np.float32 and shaped.shape == (len(rewards),)
    return shaped.tolist()


def test_removed_samples_do_not_count():
    samples = [Sample(reward=1.0), Sample(reward=0.0, remove_sample=True), Sample(reward=None)]
    assert counted_rewards(samples) == [1.0, None, None]


def test_mean_and_centred_by_hand():
    groups = Groups(np.array([1.0, 3.0, 0.1, 0.1, 0.1, 7.0]), np.array([1, 1, 0, 0, 0, 2]))
    assert groups.sizes_M.tolist() == [2, 2, 3, 3, 3, 1]
    assert groups.mean(groups.rewards_M)[[0, 1, 5]].tolist() == [2, 2, 7]
    assert groups.centred().tolist() == [-1, 1, 0, 0, 0, 0]
    assert groups.deviations().tolist() == [2**0.5, 2**0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("estimator", GROUPED)
def test_groups_are_found_by_their_index_not_by_position(estimator):
    interleaved = shape(estimator, [1.0, 5.0, 0.0, 7.0, 6.0], [0, 9, 0, 9, 9])
    assert interleaved[0::2][:2] == shape(estimator, [1.0, 0.0], [4, 4])
    assert interleaved[1::2] + interleaved[4:] == shape(estimator, [5.0, 7.0, 6.0], [1, 1, 1])


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_group_of_one_and_equal_rewards_are_exactly_zero(estimator):
    # The mean of three times 0.1 isn't 0.1 in floating point.
    assert np.mean([0.1] * 3) != 0.1
    assert shape(estimator, [3.5, 0.1, 0.1, 0.1], [0, 1, 1, 1]) == [0, 0, 0, 0]


@pytest.mark.parametrize("estimator", GROUPED)
def test_an_abstained_reward_is_no_member(estimator):
    alone = shape(estimator, [1.0, 0.0], [0, 0])
    assert shape(estimator, [1.0, None, 0.0, None], [0, 0, 0, 1]) == [alone[0], 0, alone[1], 0]
    assert shape(estimator, [None, None], [0, 0]) == [0, 0]
    # With one member left there is nothing to compare with.
    assert shape(estimator, [1.0, None], [0, 0]) == [0, 0]


@pytest.mark.parametrize("estimator", RAW)
def test_estimators_without_groups_take_the_reward_as_it_is(estimator):
    assert shape(estimator, [1.0, None, -0.25, 2.0], [0, 0, 0, 1]) == [1.0, 0, -0.25, 2.0]


@pytest.mark.parametrize("estimator", GROUPED + RAW)
def test_pieces_of_one_rollout_count_once(estimator):
    """Rollout 5 came in three pieces, in any order: its group is (1, 0, 0), not (1, 1, 1, 0, 0)."""
    whole = shape(estimator, [1.0, 0.0, 0.0, 4.0, 2.0], [0, 0, 0, 1, 1])
    rewards, groups, rollouts = [1.0, 0.0, 1.0, 4.0, 0.0, 1.0, 2.0], [0, 0, 0, 1, 0, 0, 1], [5, 2, 5, 7, 3, 5, 6]
    shaped = shape(estimator, rewards, groups, rollouts)
    assert [shaped[0], shaped[1], shaped[4], shaped[3], shaped[6]] == whole
    assert shaped[0] == shaped[2] == shaped[5]


def test_a_piece_that_abstains_does_not_speak_for_its_rollout():
    shaped = shape("dr_grpo", [1.0, None, 0.0, None], [0, 0, 0, 0], [3, 3, 4, 5])
    assert shaped == [0.5, 0, -0.5, 0]


def test_a_rollout_alone_in_its_group_is_zero_however_many_its_pieces():
    assert shape("grpo", [2.0, 2.0, 2.0], [0, 0, 0], [8, 8, 8]) == [0, 0, 0]


def test_refuses_pieces_that_contradict_each_other():
    with pytest.raises(ValueError, match=r"rollout 3: its 2 samples have the rewards \[0.0, 1.0\].*\(1 rollouts"):
        shape("grpo", [1.0, 0.0, 0.0], [0, 0, 0], [3, 3, 4])
    with pytest.raises(ValueError, match=r"rollout 3: its 2 samples have the groups \[0, 1\].*need the same group"):
        shape("ppo", [1.0, 1.0, 0.0], [0, 1, 1], [3, 3, 4])


def test_refuses_rewards_that_are_no_numbers():
    with pytest.raises(ValueError, match="1 of 2 rewards aren't finite.*or None to abstain"):
        shape("ppo", [float("nan"), 1.0, None], [0, 0, 0])
    with pytest.raises(ValueError, match="got 2 rewards, 1 groups, 2 rollout ids"):
        shape("grpo", [0.0, 1.0], [0])
    with pytest.raises(ValueError, match="got 2 rewards, 2 groups, 1 rollout ids"):
        shape("grpo", [0.0, 1.0], [0, 0], [0])


@pytest.mark.parametrize("estimator", GROUPED)
def test_rewards_as_they_are_on_request(estimator):
    shaped = shape_rewards(ESTIMATORS[estimator], [1.0, None, -0.25], [0, 0, 0], range(3), compare=False)
    assert shaped.tolist() == [1.0, 0, -0.25]


def test_members_and_their_samples():
    members = members_of([1.0, None, 1.0, 0.0], [7, 7, 7, 2], [4, 9, 4, 1])
    assert members.member_S.tolist() == [1, -1, 1, 0]
    assert members.groups.rewards_M.tolist() == [0, 1] and members.groups.group_M.tolist() == [0, 1]
    assert members.spread(np.array([0.5, 2.0])).tolist() == [2, 0, 2, 0.5]


def test_a_million_samples_take_seconds():
    size = 1_000_000
    rewards = np.random.default_rng(0).integers(0, 2, size).astype(float).tolist()
    start = time.process_time()
    shaped = shape_rewards(ESTIMATORS["grpo"], rewards, np.arange(size) // 8, np.arange(size), std=True)
    assert time.process_time() - start < 3
    assert abs(shaped.mean()) < 1e-6
