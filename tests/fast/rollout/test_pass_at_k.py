import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from miles.rollout.pass_at_k import mean_pass_at_k, pass_at_k


def by_enumeration(n, c, k):
    """The share of all choices of k among n samples, the first c of them right, that hold a right one."""
    choices = list(itertools.combinations(range(n), k))
    return Fraction(sum(min(choice) < c for choice in choices), len(choices))


def closed_form(n, c, k):
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


@pytest.mark.parametrize("n", range(1, 9))
def test_it_is_the_share_of_all_choices(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        assert closed_form(n, c, k) == by_enumeration(n, c, k)
        assert pass_at_k(n, c, k) == pytest.approx(float(by_enumeration(n, c, k)), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(1000, 3, 100), (10_000, 1, 1), (10_000, 9_999, 2), (4096, 17, 1024)])
def test_large_numbers(n, c, k):
    assert pass_at_k(n, c, k) == pytest.approx(float(closed_form(n, c, k)), rel=1e-12)


def test_the_ends_are_exact():
    assert pass_at_k(7, 0, 7) == 0 and pass_at_k(7, 1, 7) == 1 and pass_at_k(7, 7, 1) == 1
    assert pass_at_k(7, 5, 3) == 1, "three of seven always hold one of five"


def test_it_is_unbiased():
    """Its mean over many draws of n is the chance for k: what 1 - (1 - c/n)^k, which is biased, misses by far more."""
    chance, n, k = 0.3, 6, 3
    drawn = np.random.default_rng(0).binomial(n, chance, 20_000)
    right = 1 - (1 - chance) ** k
    assert np.mean([pass_at_k(n, c, k) for c in drawn]) == pytest.approx(right, abs=0.006)
    assert abs(np.mean(1 - (1 - drawn / n) ** k) - right) > 0.03


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_numbers(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples"):
        pass_at_k(n, c, k)


def test_mean_over_groups():
    assert mean_pass_at_k([[1, 0, 0, 0]]) == {1: 0.25, 2: 0.5, 4: 1}
    assert mean_pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]]) == {1: 0.125, 2: 0.25, 4: 0.5}
    assert list(mean_pass_at_k([[0.0] * 9])) == [1, 2, 4, 8]
    assert mean_pass_at_k([[0.99, 2.0]]) == {1: 0, 2: 0}, "only 1 is right"
    assert mean_pass_at_k([[0.9999999999999999]]) == {1: 1}, "but for rounding"


def test_a_reward_that_is_missing_is_no_sample():
    assert mean_pass_at_k([[1, None, 0, None]]) == {1: 0.5, 2: 1}
    assert mean_pass_at_k([[1, None], [0, 0]]) == {1: 0.5, 2: 0}, "the first group says nothing about pass@2"
    assert mean_pass_at_k([[None], []]) == {}
