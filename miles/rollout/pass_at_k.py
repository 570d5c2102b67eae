"""pass@k: the chance that at least one of k samples of a prompt is right.

The unbiased estimate of Chen et al. 2021 (https://arxiv.org/abs/2107.03374): with n samples, c of them right, it is
1 - C(n - c, k) / C(n, k), the share of the choices of k among the n that hold a right one.
"""

from collections.abc import Sequence

from miles.rollout.equal_rewards import same_reward

RIGHT = 1.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """The estimate from n samples, c of them right; 1 <= k <= n.

    As a product of n - c - i + 1 over n - i + 1 it needs no large numbers.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples, {c} of them right: 0 <= right <= samples and 1 <= k <= samples")
    all_wrong = 1.0
    for i in range(k):
        all_wrong *= max(n - c - i, 0) / (n - i)
    return 1.0 - all_wrong


def _right(group: Sequence[float]) -> int:
    return sum(same_reward(reward, RIGHT) for reward in group)


def mean_pass_at_k(groups: Sequence[Sequence[float | None]]) -> dict[int, float]:
    """Mean pass@k over the groups, by k = 1, 2, 4, ... up to the size of the largest.

    Args:
        groups: the rewards of each group of samples, all of them; 1 is right, None is no sample. A group with fewer
            than k rewards says nothing about pass@k.
    """
    known = [[reward for reward in group if reward is not None] for group in groups]
    rates, k = {}, 1
    while large := [group for group in known if len(group) >= k]:
        rates[k] = sum(pass_at_k(len(group), _right(group), k) for group in large) / len(large)
        k *= 2
    return rates
