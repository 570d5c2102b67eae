import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.training.advantages import ESTIMATORS, AdvantageInputs
from miles.training.advantages.estimator import compute_advantages
from miles.training.advantages.responses import Responses

NAN, INF = math.nan, math.inf
# Two samples of four tokens; the second token of a mask's hole and the last token hold what must not be read.
RESPONSES = Responses(torch.tensor([0, 4, 8]), torch.tensor([1, 1, 0, 1, 0, 1, 1, 0], dtype=torch.bool))
REWARDS = torch.tensor([1.0, -2.0])
KL = torch.tensor([1.0, 2.0, NAN, 3.0, INF, 4.0, 0.0, NAN])


def compute(responses, rewards, kl, kl_coef, gamma=1.0, estimator="reinforce_plus_plus"):
    inputs = AdvantageInputs(responses, rewards, kl=kl, kl_coef=kl_coef, gamma=gamma, lambd=0.3)
    advantages, returns = compute_advantages(ESTIMATORS[estimator], inputs)
    assert returns is None and advantages.dtype == torch.float32 and advantages.shape == responses.mask.shape
    return advantages


def test_two_samples_by_four_tokens_by_hand():
    """r = -0.1, -0.2, (hole), 1 - 0.3 and -0.4, -2: backwards, half of the next is added."""
    expected = [-0.025, 0.15, 0, 0.7, 0, -1.4, -2, 0]
    torch.testing.assert_close(compute(RESPONSES, REWARDS, KL, 0.1, 0.5), torch.tensor(expected))


def test_without_discount_the_last_token_alone_gets_the_reward():
    expected = [-0.1, -0.2, 0, 0.7, 0, -0.4, -2, 0]
    torch.testing.assert_close(compute(RESPONSES, REWARDS, KL, 0.1, 0.0), torch.tensor(expected))


def test_with_discount_one_and_no_kl_every_token_gets_exactly_the_reward():
    # A third is no short binary fraction: a prefix sum over all samples would round.
    advantages = compute(RESPONSES, torch.tensor([1 / 3, -2 / 3]), None, 0.0)
    assert advantages.tolist() == torch.tensor([1 / 3, 1 / 3, 0, 1 / 3, 0, -2 / 3, -2 / 3, 0]).tolist()


def test_a_kl_without_weight_is_not_read():
    nans = torch.full((8,), NAN)
    assert compute(RESPONSES, REWARDS, nans, 0.0).tolist() == compute(RESPONSES, REWARDS, None, 0.0).tolist()


def test_baseline_by_hand():
    expected = [0.9, 0.8, 0, 0.7, 0, -2.4, -2, 0]
    for gamma in (0.0, 0.5, 1.0):
        advantages = compute(RESPONSES, REWARDS, KL, 0.1, gamma, "reinforce_plus_plus_baseline")
        torch.testing.assert_close(advantages, torch.tensor(expected))
    advantages = compute(RESPONSES, REWARDS, None, 0.0, 0.5, "reinforce_plus_plus_baseline")
    assert advantages.tolist() == [1, 1, 0, 1, 0, -2, -2, 0]


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_fully_masked_sample_is_zero_and_its_reward_not_read(estimator):
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    kl = torch.where(mask, 0.5, NAN)
    advantages = compute(Responses(RESPONSES.offsets, mask), torch.tensor([NAN, 1.0]), kl, 0.1, 0.9, estimator)
    assert advantages[:4].tolist() == [0] * 4 and advantages[4:].isfinite().all() and (advantages[4:] != 0).all()
    nothing = Responses(RESPONSES.offsets, torch.zeros(8, dtype=torch.bool))
    assert compute(nothing, torch.tensor([NAN, NAN]), KL, 0.1, 0.9, estimator).tolist() == [0] * 8


def test_pulling_a_hole_out_changes_nothing():
    """A tool's tokens between the model's are no steps: the return is that of the model's tokens alone."""
    short = Responses(torch.tensor([0, 3]), torch.ones(3, dtype=torch.bool))
    long = Responses(torch.tensor([0, 6]), torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool))
    expected = compute(short, torch.tensor([1.0]), torch.tensor([0.1, 0.2, 0.3]), 0.5, 0.7)
    got = compute(long, torch.tensor([1.0]), torch.tensor([0.1, NAN, NAN, 0.2, NAN, 0.3]), 0.5, 0.7)
    assert got[long.mask].tolist() == expected.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_a_plain_loop(data):
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    n = sum(lengths)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    floats = st.floats(-5, 5, width=32)
    kl = torch.tensor(data.draw(st.lists(floats, min_size=n, max_size=n)))
    rewards = torch.tensor(data.draw(st.lists(floats, min_size=len(lengths), max_size=len(lengths))))
    gamma, kl_coef = data.draw(st.sampled_from([0.0, 0.5, 0.97, 1.0])), data.draw(st.sampled_from([0.01, 1.0]))
    offsets = torch.tensor([0, *lengths]).cumsum(0)

    expected = torch.zeros(n, dtype=torch.float64)
    for sample in range(len(lengths)):
        following, last = 0.0, True
        for t in reversed(range(offsets[sample], offsets[sample + 1])):
            if mask[t]:
                following = -kl_coef * kl[t].item() + (rewards[sample].item() if last else 0.0) + gamma * following
                expected[t], last = following, False
    got = compute(Responses(offsets, mask), rewards, kl, kl_coef, gamma)
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)
