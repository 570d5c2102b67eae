import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.training.advantages import ESTIMATORS, AdvantageInputs
from miles.training.advantages.estimator import outcome_advantages
from miles.training.advantages.groups import shape_rewards
from miles.training.advantages.grpo import GRPO
from miles.training.advantages.responses import Responses

MEMBERS = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 4)), min_size=1, max_size=20)


def test_two_groups_by_hand():
    """Group 7 has the mean 1/3 and the variance (4/9 + 1/9 + 1/9) / 2 = 1/3."""
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 1.0], [7, 7, 7, 3, 3]
    deviation = (1 / 3) ** 0.5 + 1e-6
    shaped = shape_rewards(GRPO, rewards, groups, range(5), std=True)
    np.testing.assert_allclose(shaped, [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, 0, 0], rtol=1e-7)
    shaped = shape_rewards(GRPO, rewards, groups, range(5), std=False)
    np.testing.assert_allclose(shaped, [2 / 3, -1 / 3, -1 / 3, 0, 0], rtol=1e-7)


def test_rewards_that_differ_little_are_damped_by_the_epsilon():
    """1e-6 apart: deviation 1e-6 / sqrt(2), so that 1e-6 weighs more than it."""
    shaped = shape_rewards(GRPO, [0.0, 1e-6], [0, 0], range(2), std=True)
    np.testing.assert_allclose(shaped, [-0.5 / (0.5**0.5 + 1), 0.5 / (0.5**0.5 + 1)], rtol=1e-6)


@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce_plus_plus_baseline"])
def test_dr_grpo_never_divides(estimator):
    for std in (True, False):
        shaped = shape_rewards(ESTIMATORS[estimator], [3.0, 0.0, 0.0], [0, 0, 0], range(3), std=std)
        assert shaped.tolist() == [2, -1, -1]


@settings(max_examples=50, deadline=None)
@given(MEMBERS, st.booleans())
def test_against_a_plain_loop(members, std):
    rewards, groups = map(list, zip(*members, strict=True))
    expected = []
    for reward, group in members:
        own = [r for r, g in members if g == group]
        if len(set(own)) == 1:
            expected.append(0.0)
        else:
            expected.append((reward - np.mean(own)) / (np.std(own, ddof=1) + 1e-6 if std else 1.0))
    for estimator in ("grpo", "gspo", "cispo"):
        shaped = shape_rewards(ESTIMATORS[estimator], rewards, groups, range(len(rewards)), std=std)
        np.testing.assert_allclose(shaped, expected, rtol=1e-5, atol=1e-6)


def test_each_trainable_token_has_its_samples_reward():
    mask = torch.tensor([True, True, False, True, False, True, True, False])
    inputs = AdvantageInputs(Responses(torch.tensor([0, 4, 8]), mask), torch.tensor([0.5, -1.0]))
    advantages, _ = outcome_advantages(inputs)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [0.5, 0.5, 0, 0.5, 0, -1, -1, 0]
