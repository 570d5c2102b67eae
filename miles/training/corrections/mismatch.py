"""How far the engine, the trainer that it was filled from, and the trainer now are apart."""

import torch

from miles.training.losses.kl import kl_estimate
from miles.training.losses.numbers import bounded_exp
from miles.training.packing import PackedBatch
from miles.training.sample_sums import SampleSums


def mismatch_metrics(
    log_ratio_N: torch.Tensor, trainer_N: torch.Tensor, rollout_N: torch.Tensor, sums: SampleSums
) -> dict[str, torch.Tensor]:
    """For the metrics [N] by name; all inputs without gradient and finite, masked tokens too.

    - train_rollout_logprob_abs_diff: |trainer - rollout|.
    - train_rollout_kl: k3 estimate of KL(engine || trainer) with bounds (`kl_estimate`).
    - ess_ratio: effective sample size of a sequence's tokens as a share of them, (sum w)^2 / (n sum w^2) with
      w = exp(log_ratio): 1 where all weigh the same, 1 / n where one outweighs the others (Kish 1965).
    - rollout_ess_ratio: the same with w = exp(trainer - rollout).

    Args:
        log_ratio_N: log-probability now minus that of the ratio's denominator.
        trainer_N: the trainer's log-probability under the weights that the engine has.
        rollout_N: the engine's log-probability.
        sums: of the micro-batch.
    """
    weights_N2 = bounded_exp(torch.stack((log_ratio_N, trainer_N - rollout_N), dim=-1)).double()
    sums_S4 = sums.sum(torch.cat((weights_N2, weights_N2.square()), dim=-1))
    # Without trainable tokens: 0 / 1.
    ess_S2 = sums_S4[:, :2].square() / (sums.count_S[:, None] * sums_S4[:, 2:]).clamp(min=torch.finfo().tiny)
    ess_N2 = sums.spread(ess_S2)
    return {
        "train_rollout_logprob_abs_diff": (trainer_N - rollout_N).abs(),
        "train_rollout_kl": kl_estimate(rollout_N, trainer_N, "low_var_kl"),
        "ess_ratio": ess_N2[:, 0],
        "rollout_ess_ratio": ess_N2[:, 1],
    }


def extremes(name: str, x_N: torch.Tensor, packed: PackedBatch) -> dict[str, torch.Tensor]:
    """`name`_max and `name`_min over the trainable tokens; -inf and inf where there are none.

    Other than all other metrics they must be reduced over micro-batches and ranks by maximum and minimum.
    """
    infinity = x_N.new_full((1,), torch.inf)
    return {
        f"{name}_max": torch.cat((torch.where(packed.mask_N, x_N, -torch.inf), -infinity)).max(),
        f"{name}_min": torch.cat((torch.where(packed.mask_N, x_N, torch.inf), infinity)).min(),
    }
