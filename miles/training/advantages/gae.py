"""Generalised advantage estimation, for ppo."""

import torch
from torch import Tensor

from miles.training.advantages.responses import Responses


def gae(responses: Responses, rewards_S: Tensor, values_n: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """A_t = delta_t + gamma lambd A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t; the value's target is A_t + V_t.

    Source: https://arxiv.org/abs/1506.02438, eq. 16. r_t is the sample's reward at its last trainable token, else 0.
    The next token is the next trainable one: what a tool wrote is no step. After the last one V is 0, also where the
    response was cut off at the length limit.

    Args:
        responses: the tokens.
        rewards_S: the reward of each sample as it is.
        values_n: the critic's value before each token.
        gamma: the discount.
        lambd: 0 trusts the critic alone, 1 the rewards alone.

    Returns:
        Advantages and targets of the values ("returns"), float32 [n] each.
    """
    last_m = responses.left_m == 1
    values_m = responses.select(values_n)
    next_m = torch.where(last_m, 0.0, values_m.roll(-1))
    rewards_m = torch.where(last_m, responses.spread(rewards_S), 0.0)
    advantages_m = responses.discounted_sums(rewards_m + gamma * next_m - values_m, gamma * lambd)
    return responses.place(advantages_m), responses.place(advantages_m + values_m)
