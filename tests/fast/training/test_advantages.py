import numpy as np
import pytest
import torch

from miles.training.advantages import counted_rewards, grpo_advantages, normalize_group_rewards
from miles.utils.types import Sample


def test_two_groups_by_hand():
    result = normalize_group_rewards([1.0, 0.0, 0.0, 1.0, 1.0], [7, 7, 7, 3, 3], std=True)
    deviation = np.std([1, 0, 0], ddof=1) + 1e-6
    np.testing.assert_allclose(result, [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, 0, 0], rtol=1e-6)
    result = normalize_group_rewards([1.0, 0.0, 0.0, 1.0, 1.0], [7, 7, 7, 3, 3], std=False)
    np.testing.assert_allclose(result, [2 / 3, -1 / 3, -1 / 3, 0, 0], rtol=1e-6)


def test_groups_are_found_by_their_index_not_by_position():
    interleaved = normalize_group_rewards([1.0, 5.0, 0.0, 7.0, 6.0], [0, 1, 0, 1, 1], std=True)
    assert interleaved[[0, 2]].tolist() == normalize_group_rewards([1.0, 0.0], [0, 0], std=True).tolist()
    assert interleaved[[1, 3, 4]].tolist() == normalize_group_rewards([5.0, 7.0, 6.0], [1, 1, 1], std=True).tolist()


@pytest.mark.parametrize("std", [True, False])
def test_group_of_one_and_equal_rewards_are_exactly_zero(std):
    # The mean of three times 0.1 isn't 0.1 in floating point.
    assert normalize_group_rewards([3.5, 0.1, 0.1, 0.1], [0, 1, 1, 1], std).tolist() == [0, 0, 0, 0]


def test_an_abstained_reward_is_no_member():
    result = normalize_group_rewards([1.0, None, 0.0, None], [0, 0, 0, 1], std=False)
    assert result.tolist() == [0.5, 0, -0.5, 0]
    assert normalize_group_rewards([None, None], [0, 0], std=True).tolist() == [0, 0]
    # With one member left there is nothing to compare with.
    assert normalize_group_rewards([1.0, None], [0, 0], std=True).tolist() == [0, 0]


def test_removed_samples_do_not_count():
    samples = [Sample(reward=1.0), Sample(reward=0.0, remove_sample=True), Sample(reward=None)]
    assert counted_rewards(samples) == [1.0, None, None]


def test_refuses_rewards_that_are_no_numbers():
    with pytest.raises(ValueError, match="1 of 2 rewards aren't finite"):
        normalize_group_rewards([float("nan"), 1.0], [0, 0], std=True)
    with pytest.raises(ValueError, match="2 rewards for 1 samples"):
        normalize_group_rewards([0.0, 1.0], [0], std=True)


def test_grpo_advantages_repeat_the_reward_for_each_token():
    advantages_N = grpo_advantages(torch.tensor([0.5, -1.0]), torch.tensor([0, 0, 1, 1, 1]))
    assert advantages_N.tolist() == [0.5, 0.5, -1, -1, -1]
