"""Truncated and masked importance sampling between the engine, which wrote the tokens, and the trainer."""

from dataclasses import dataclass
from typing import Literal

import torch

from miles.config.off_policy import Level
from miles.training.corrections.levels import log_ratio_at
from miles.training.losses.numbers import bounded_exp
from miles.training.sample_sums import SampleSums


@dataclass(frozen=True)
class TisSettings:
    """`level`: whose ratio. `mode`: what happens out of [low, high]: moved to the bound, or weight 0."""

    level: Level
    mode: Literal["truncate", "mask"]
    low: float
    high: float


def importance_weights(
    log_ratio_N: torch.Tensor, settings: TisSettings, sums: SampleSums
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weight of each token's policy loss.

    With r = p_trainer / p_engine, before the step's update: truncate: clip(r, low, high); mask: r within [low, high],
    0 outside, which is IcePop. IcePop's M(r; low, high) does multiply the loss with r where it is in range; it is no
    mere mask.

    Sources: TIS (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl); IcePop, Ring-1T
    (https://arxiv.org/abs/2510.18855, "IcePop"; its bounds are 0.5 and 5); sequence and geometric level, MIS (Liu et
    al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse).

    Args:
        log_ratio_N: log-probability under the trainer, before its update, minus that under the engine.
        settings: level, mode and bounds.
        sums: of the micro-batch.

    Returns:
        Weights [N], and for the metrics [N] by name: `tis`, the ratio, held within e^+-20; `tis_clipfrac`, 1 where it
        is out of bounds; `tis_abs`, its distance from 1.
    """
    ratio_N = bounded_exp(log_ratio_at(settings.level, log_ratio_N, sums))
    outside_N = (ratio_N < settings.low) | (ratio_N > settings.high)
    if settings.mode == "truncate":
        weight_N = ratio_N.clamp(settings.low, settings.high)
    else:
        weight_N = torch.where(outside_N, 0.0, ratio_N)
    return weight_N, {"tis": ratio_N, "tis_clipfrac": outside_N.float(), "tis_abs": (ratio_N - 1).abs()}
