"""One way in to all estimators: rewards are shaped where they are made, advantages computed where they are used."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from miles.training.advantages.gae import gae
from miles.training.advantages.groups import members_of
from miles.training.advantages.grpo import group_relative, outcome_advantages
from miles.training.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from miles.training.advantages.responses import Responses
from miles.training.advantages.rloo import leave_one_out


class Advantages(NamedTuple):
    """What tokens are trained with: float32 [n] each, 0 at masked tokens.

    Args:
        advantages: of each response token.
        returns: target of the critic's value there; None without a critic.
    """

    advantages: Tensor
    returns: Tensor | None


def shape_rewards(
    estimator: str,
    rewards: Sequence[float | None],
    group_indices: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    std: bool,
) -> np.ndarray:
    """What an estimator makes of the rewards before tokens come in: float32 [S].

    | estimator | reward |
    | --- | --- |
    | grpo, gspo, cispo | `group_relative`, with `std` as given |
    | dr_grpo, reinforce_plus_plus_baseline | `group_relative`, never divided |
    | rloo | `leave_one_out` |
    | reinforce_plus_plus, ppo | as it is |

    Samples with the same `rollout_id` are pieces of one trajectory: they count once in their group, and each gets the
    same result. A reward of None is no member of its group and comes out as 0.

    Args:
        estimator: --advantage-estimator.
        rewards: one a sample; None abstains.
        group_indices: the group of each sample, in any order, in groups of any size.
        rollout_ids: the rollout of each sample.
        std: divide by the group's standard deviation, in the estimators that have it.

    Raises:
        ValueError: counts that differ, a reward that is not finite, or pieces of one rollout with different rewards or
            groups.
    """
    members = members_of(rewards, group_indices, rollout_ids)
    match estimator:
        case "grpo" | "gspo" | "cispo":
            shaped_M = group_relative(members.groups, std)
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            shaped_M = group_relative(members.groups, std=False)
        case "rloo":
            shaped_M = leave_one_out(members.groups)
        case "reinforce_plus_plus" | "ppo":
            shaped_M = members.groups.rewards_M
        case _:
            raise AssertionError(f"estimator {estimator!r} is unknown")
    return members.spread(shaped_M)


def compute_advantages(
    estimator: str,
    responses: Responses,
    rewards_S: Tensor,
    *,
    kl: Tensor | None,
    kl_coef: float,
    values: Tensor | None,
    gamma: float,
    lambd: float,
) -> Advantages:
    """The advantage of each response token of whole samples, on the CPU, before whitening.

    What stands at masked tokens of `kl` and `values`, NaN included, is not read.

    Args:
        estimator: --advantage-estimator.
        responses: the tokens, and which of them are trained on.
        rewards_S: float [S], from `shape_rewards`.
        kl: float [n], estimate of KL(model || reference) at each token; None where `kl_coef` is 0. Only the
            reinforce_plus_plus estimators have it.
        kl_coef: its weight in the reward.
        values: float [n], the critic's values; needed by ppo, None for all others.
        gamma: discount of later rewards: reinforce_plus_plus and ppo.
        lambd: lambda of ppo's GAE.
    """
    with_kl = estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    assert kl_coef == 0 or (with_kl and kl is not None), f"{estimator} with kl_coef {kl_coef}, kl {kl}"
    assert (values is not None) == (estimator == "ppo"), f"{estimator} with values {values}"
    kl = kl if kl_coef else None
    match estimator:
        case "grpo" | "gspo" | "cispo" | "dr_grpo" | "rloo":
            return Advantages(outcome_advantages(responses, rewards_S), None)
        case "reinforce_plus_plus":
            return Advantages(reinforce_plus_plus(responses, rewards_S, kl, kl_coef, gamma), None)
        case "reinforce_plus_plus_baseline":
            return Advantages(reinforce_plus_plus_baseline(responses, rewards_S, kl, kl_coef), None)
        case "ppo":
            return Advantages(*gae(responses, rewards_S, values, gamma, lambd))
        case _:
            raise AssertionError(f"estimator {estimator!r} is unknown")
