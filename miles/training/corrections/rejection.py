"""Rejection sampling: what the engine would hardly have written with the trainer's probabilities is left out."""

import math
from dataclasses import dataclass

import torch

from miles.config.off_policy import Level
from miles.training.corrections.levels import log_ratio_at
from miles.training.sample_sums import SampleSums


@dataclass(frozen=True)
class RejectionSettings:
    """`level`: whose ratio must lie within [low, high]. `veto`: bound of every single token's ratio, None for none."""

    level: Level
    low: float
    high: float
    veto: float | None


def rejected(
    log_ratio_N: torch.Tensor, settings: RejectionSettings, sums: SampleSums
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Which tokens to leave out: those whose r = p_trainer / p_engine, or whose sequence's r, is out of [low, high].

    The veto leaves out a whole sequence if r of any one of its trainable tokens is below `veto`.

    Source: MIS (Liu et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse).

    Args:
        log_ratio_N: log-probability under the trainer, before its update, minus that under the engine.
        settings: level and bounds.
        sums: of the micro-batch.

    Returns:
        bool [N], and for the metrics [N] by name: `rs_fraction`, 1 where a token is left out; `rs_veto_fraction`, 1
        where it is by the veto.
    """
    level_N = log_ratio_at(settings.level, log_ratio_N, sums)
    # Bounds of the logarithm: a ratio too large for float32 is still above them.
    low = math.log(settings.low) if settings.low > 0 else -math.inf
    out_N = (level_N < low) | (level_N > math.log(settings.high))
    vetoed_N = torch.zeros_like(out_N)
    if settings.veto is not None:
        vetoed_N = sums.spread(sums.sum((log_ratio_N < math.log(settings.veto)).float())) > 0
    out_N = out_N | vetoed_N
    return out_N, {"rs_fraction": out_N.float(), "rs_veto_fraction": vetoed_N.float()}
