import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.training.advantages import AdvantageInputs
from miles.training.advantages.estimator import compute_advantages
from miles.training.advantages.ppo import PPO
from miles.training.advantages.responses import Responses

NAN, INF = math.nan, math.inf
RESPONSES = Responses(torch.tensor([0, 4, 8]), torch.tensor([1, 1, 0, 1, 0, 1, 1, 0], dtype=torch.bool))
REWARDS = torch.tensor([1.0, -2.0])
VALUES = torch.tensor([0.5, 1.0, NAN, 2.0, INF, 2.0, 4.0, NAN])


def compute(responses, rewards, values, gamma, lambd):
    inputs = AdvantageInputs(responses, rewards, values=values, gamma=gamma, lambd=lambd)
    result = compute_advantages(PPO, inputs)
    for column in result:
        assert column.dtype == torch.float32 and column.shape == responses.mask.shape
    return result


def test_two_samples_by_four_tokens_by_hand():
    """gamma = lambd = 1/2. delta = 1/2 * 1 - 1/2, 1/2 * 2 - 1, (hole), 1 - 2 and 1/2 * 4 - 2, -2 - 4."""
    advantages, returns = compute(RESPONSES, REWARDS, VALUES, 0.5, 0.5)
    assert advantages.tolist() == [-0.0625, -0.25, 0, -1, 0, -1.5, -6, 0]
    assert returns.tolist() == [0.4375, 0.75, 0, 1, 0, 0.5, -2, 0]


def test_lambda_one_is_the_return_minus_the_value():
    advantages, returns = compute(RESPONSES, REWARDS, VALUES, 0.5, 1.0)
    assert returns.tolist() == [0.25, 0.5, 0, 1, 0, -1, -2, 0]
    assert advantages.tolist() == [-0.25, -0.5, 0, -1, 0, -3, -6, 0]


def test_lambda_zero_is_one_step_of_the_critic():
    advantages, returns = compute(RESPONSES, REWARDS, VALUES, 1.0, 0.0)
    assert advantages.tolist() == [0.5, 1, 0, -1, 0, 2, -6, 0]
    assert returns.tolist() == [1, 2, 0, 1, 0, 4, -2, 0]


def test_gamma_zero_looks_at_this_token_only():
    for lambd in (0.0, 1.0):
        advantages, returns = compute(RESPONSES, REWARDS, VALUES, 0.0, lambd)
        assert advantages.tolist() == [-0.5, -1, 0, -1, 0, -2, -6, 0]
        assert returns.tolist() == [0, 0, 0, 1, 0, 0, -2, 0]


def test_a_new_critic_of_zeros_gives_every_token_the_reward():
    advantages, returns = compute(RESPONSES, REWARDS, torch.zeros(8), 1.0, 1.0)
    assert advantages.tolist() == returns.tolist() == [1, 1, 0, 1, 0, -2, -2, 0]


def test_a_fully_masked_sample_is_zero_and_not_read():
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    values = torch.where(mask, 0.5, NAN)
    advantages, returns = compute(Responses(RESPONSES.offsets, mask), torch.tensor([NAN, 1.0]), values, 1.0, 1.0)
    assert advantages.tolist() == [0] * 4 + [0.5] * 4 and returns.tolist() == [0] * 4 + [1] * 4
    nothing = Responses(RESPONSES.offsets, torch.zeros(8, dtype=torch.bool))
    advantages, returns = compute(nothing, torch.tensor([NAN, NAN]), VALUES, 0.9, 0.9)
    assert advantages.tolist() == returns.tolist() == [0] * 8


def loop(offsets, mask, rewards, values, gamma, lambd):
    """GAE as in the paper, backwards over each sample's trainable tokens."""
    expected = torch.zeros(len(mask), dtype=torch.float64)
    for sample in range(len(offsets) - 1):
        reward, value, advantage = rewards[sample].item(), 0.0, 0.0
        for t in reversed(range(offsets[sample], offsets[sample + 1])):
            if mask[t]:
                delta = reward + gamma * value - values[t].item()
                advantage = delta + gamma * lambd * advantage
                expected[t], reward, value = advantage, 0.0, values[t].item()
    return expected.float()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_a_plain_loop(data):
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    n = sum(lengths)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    floats = st.floats(-5, 5, width=32)
    values = torch.tensor(data.draw(st.lists(floats, min_size=n, max_size=n)))
    rewards = torch.tensor(data.draw(st.lists(floats, min_size=len(lengths), max_size=len(lengths))))
    gamma, lambd = (data.draw(st.sampled_from([0.0, 0.5, 0.97, 1.0])) for _ in range(2))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    advantages, returns = compute(Responses(offsets, mask), rewards, values, gamma, lambd)
    expected = loop(offsets, mask, rewards, values, gamma, lambd)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.3, 0.3), (1.0, 1.0)])
def test_long_samples_against_the_loop(gamma, lambd):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 100_000, 100_007, 120_000])
    mask = torch.rand(120_000, generator=generator) < 0.8
    values, rewards = torch.randn(120_000, generator=generator), torch.randn(3, generator=generator)
    advantages, _ = compute(Responses(offsets, mask), rewards, values, gamma, lambd)
    expected = loop(offsets.tolist(), mask.tolist(), rewards, values, gamma, lambd)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)


def test_four_million_tokens_take_about_a_second():
    """512 samples of 8192 tokens: 0.6 s of one core; the bound leaves room for a slower one."""
    samples, length = 512, 8192
    responses = Responses(torch.arange(samples + 1) * length, torch.ones(samples * length, dtype=torch.bool))
    rewards, values = torch.randn(samples), torch.randn(samples * length)
    start = time.process_time()
    compute(responses, rewards, values, 0.99, 0.95)
    assert time.process_time() - start < 3
