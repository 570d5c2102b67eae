"""What is done about, and known of, tokens that another model wrote than the one in training; one file an algorithm."""

from miles.training.corrections.levels import log_ratio_at
from miles.training.corrections.mismatch import extremes, mismatch_metrics
from miles.training.corrections.opsm import off_policy_sequences
from miles.training.corrections.rejection import RejectionSettings, rejected
from miles.training.corrections.tis import TisSettings, importance_weights

__all__ = [
    "RejectionSettings",
    "TisSettings",
    "extremes",
    "importance_weights",
    "log_ratio_at",
    "mismatch_metrics",
    "off_policy_sequences",
    "rejected",
]
