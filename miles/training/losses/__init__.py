"""Losses of single tokens, one short file an algorithm, and the one way to add them up."""

from miles.training.losses.cispo import cispo_loss
from miles.training.losses.clip import PolicyTerm, clip_loss
from miles.training.losses.gspo import sequence_log_ratio
from miles.training.losses.kl import KL_KINDS, kl_estimate, unbiased_kl
from miles.training.losses.numbers import MAX_LOG_RATIO, bounded_exp, weighted_sum
from miles.training.losses.sft import sft_loss
from miles.training.losses.value import ValueTerm, value_loss

__all__ = [
    "KL_KINDS",
    "MAX_LOG_RATIO",
    "PolicyTerm",
    "ValueTerm",
    "bounded_exp",
    "cispo_loss",
    "clip_loss",
    "kl_estimate",
    "sequence_log_ratio",
    "sft_loss",
    "unbiased_kl",
    "value_loss",
    "weighted_sum",
]
