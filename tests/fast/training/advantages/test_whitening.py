import math
import sys

import torch
import torch.distributed as dist

from miles.training.advantages.whitening import whiten


class Calls(list):
    """An all-reduce of one rank that notes its arguments."""

    def __call__(self, tensor):
        self.append(tensor.clone())


def test_two_samples_by_four_tokens_by_hand():
    """Of 1, 3, 5, 3, 3 the mean is 3 and the variance (4 + 0 + 4 + 0 + 0) / 5; masked tokens hold what is not read."""
    advantages = torch.tensor([1.0, 3.0, math.nan, 5.0, math.inf, 3.0, 3.0, -math.inf])
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0], dtype=torch.bool)
    result = whiten(advantages, mask, Calls())
    deviation = (1.6 + 1e-8) ** 0.5
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([-2 / deviation, 0, 0, 2 / deviation, 0, 0, 0, 0]))


def test_the_epsilon_stands_under_the_root():
    result = whiten(torch.tensor([1e-4, -1e-4]), torch.ones(2, dtype=torch.bool), Calls())
    torch.testing.assert_close(result, torch.tensor([0.5**0.5, -(0.5**0.5)]))


def test_equal_advantages_are_exactly_zero():
    assert whiten(torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool), Calls()).tolist() == [0] * 7


def test_a_large_mean_costs_no_digits():
    """A sum of squares of 1e6 would leave nothing of a variance of 1e-2 in float32, and less than all in float64."""
    small = torch.tensor([0.0, 0.125, 0.25, 0.125])
    mask = torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(whiten(small + 1e6, mask, Calls()), whiten(small, mask, Calls()), rtol=0, atol=0)


def test_a_rank_of_masked_tokens_reduces_like_any_other():
    none, some = Calls(), Calls()
    assert whiten(torch.tensor([math.nan] * 3), torch.zeros(3, dtype=torch.bool), none).tolist() == [0] * 3
    whiten(torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bool), some)
    assert [(x.shape, x.dtype) for x in none] == [(x.shape, x.dtype) for x in some]
    assert all(x.dtype == torch.float64 for x in some) and len(some) == 2
    assert all((x == 0).all() for x in none)
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool), Calls()).shape == (0,)


def test_three_ranks_whiten_as_one(run_ranks):
    run_ranks(__file__, 3)


def check_rank(rank, size, store):
    """Cut in unequal parts, the last of masked tokens alone."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    generator = torch.Generator().manual_seed(0)
    advantages, mask = torch.randn(40, generator=generator) * 3 + 5, torch.rand(40, generator=generator) < 0.7
    mask[30:] = False
    advantages = torch.where(mask, advantages, math.nan)
    part = slice([0, 7, 30][rank], [7, 30, 40][rank])
    whole = whiten(advantages, mask, lambda tensor: None)
    torch.testing.assert_close(whiten(advantages[part], mask[part], dist.all_reduce), whole[part], rtol=1e-6, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    check_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
