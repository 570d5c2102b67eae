"""REINFORCE++ (https://arxiv.org/abs/2501.03262): no critic, a KL penalty in the reward, advantages to be whitened."""

import torch
from torch import Tensor

from miles.training.advantages.responses import Responses


def reinforce_plus_plus(
    responses: Responses, rewards_S: Tensor, kl_n: Tensor | None, kl_coef: float, gamma: float
) -> Tensor:
    """The discounted return: A_t = r_t + gamma A_(t+1), r_t = -kl_coef kl_t + [t is the last token] R.

    Over the trainable tokens alone: others are no steps of time, and have neither a KL nor a discount.

    Args:
        responses: the tokens.
        rewards_S: R, the reward of each sample as it is.
        kl_n: estimate of KL(model || reference) at each token, or None for none.
        kl_coef: its weight.
        gamma: the discount.

    Returns:
        Advantages, float32 [n], before whitening.
    """
    last_m = responses.left_m == 1
    rewards_m = torch.where(last_m, responses.spread(rewards_S), 0.0)
    if kl_n is not None:
        rewards_m = rewards_m - kl_coef * responses.select(kl_n)
    return responses.place(responses.discounted_sums(rewards_m, gamma))


def reinforce_plus_plus_baseline(
    responses: Responses, rewards_S: Tensor, kl_n: Tensor | None, kl_coef: float
) -> Tensor:
    """A_t = R - kl_coef kl_t, with R the reward minus its group's mean ("REINFORCE++ with baseline").

    Arguments and result are those of `reinforce_plus_plus`, with centred rewards.
    """
    advantages_m = responses.spread(rewards_S)
    if kl_n is not None:
        advantages_m = advantages_m - kl_coef * responses.select(kl_n)
    return responses.place(advantages_m)
