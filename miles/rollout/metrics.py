"""What can be said about a rollout or an evaluation from its samples alone."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from miles.training.advantages import counted_rewards
from miles.utils.types import Sample


def rollout_metrics(samples: Sequence[Sample], rewards: Sequence[float] | None) -> dict[str, float]:
    """The metrics `rollout/*` of `miles.tracking.metrics`.

    Args:
        samples: all samples of the rollout.
        rewards: the normalised reward of each, or None for supervised samples, which have no reward metrics.
    """
    if not samples:
        raise ValueError("a rollout without samples has no metrics")
    metrics = {
        **_response_lengths("rollout/response_len", samples),
        "rollout/total_lengths": float(np.mean([len(sample.tokens) for sample in samples])),
        "rollout/truncated_ratio": _truncated_ratio(samples),
        "rollout/removed_ratio": float(np.mean([sample.remove_sample for sample in samples])),
    }
    if rewards is None:
        return metrics
    metrics |= {
        "rollout/raw_reward": _mean(counted_rewards(samples)),
        "rollout/rewards": float(np.mean(rewards)),
        "rollout/none_reward_ratio": _none_reward_ratio(samples),
        **_zero_std(samples),
    }
    log_probs = [value for sample in samples for value in sample.rollout_log_probs or ()]
    if log_probs:
        metrics["rollout/rollout_log_probs"] = float(np.mean(log_probs))
    if any(sample.weight_versions for sample in samples):
        mixed = [len(set(sample.weight_versions)) > 1 for sample in samples]
        metrics["rollout/weight_version/mixed_version_ratio"] = float(np.mean(mixed))
    return metrics


def eval_metrics(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics `eval/<name>*` of `miles.tracking.metrics` for one evaluation set."""
    if not samples:
        raise ValueError(f"evaluation {name!r} has no samples")
    return {
        f"eval/{name}": _mean([sample.reward for sample in samples]),
        f"eval/{name}-none_reward_ratio": _none_reward_ratio(samples),
        f"eval/{name}-truncated_ratio": _truncated_ratio(samples),
        **_response_lengths(f"eval/{name}/response_len", samples),
    }


def _mean(rewards: Sequence[float | None]) -> float:
    """Mean of the rewards that aren't None; NaN if all are."""
    known = [reward for reward in rewards if reward is not None]
    return float(np.mean(known)) if known else float("nan")


def _none_reward_ratio(samples: Sequence[Sample]) -> float:
    return float(np.mean([sample.reward is None for sample in samples]))


def _truncated_ratio(samples: Sequence[Sample]) -> float:
    return float(np.mean([sample.status is Sample.Status.TRUNCATED for sample in samples]))


def _response_lengths(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [s.response_length if s.loss_mask is None else sum(s.loss_mask) for s in samples]
    statistics = {"mean": np.mean, "median": np.median, "max": np.max, "min": np.min}
    return {f"{prefix}/{name}": float(statistic(lengths)) for name, statistic in statistics.items()}


def _zero_std(samples: Sequence[Sample]) -> dict[str, float]:
    """Groups that teach nothing, because all their members got the same reward."""
    groups = defaultdict(list)
    for sample, reward in zip(samples, counted_rewards(samples), strict=True):
        if reward is not None:
            groups[sample.group_index].append(reward)
    if not groups:
        return {}
    equal = [rewards[0] for rewards in groups.values() if min(rewards) == max(rewards)]
    # Adding 0 turns -0.0 into 0.0.
    counts = Counter(f"rollout/zero_std/count_{round(reward, 1) + 0.0}" for reward in equal)
    return {
        **{name: float(count) for name, count in sorted(counts.items())},
        "rollout/zero_std/all_zero_percentage": 100 * sum(reward == 0 for reward in equal) / len(groups),
        "rollout/zero_std/all_one_percentage": 100 * sum(reward == 1 for reward in equal) / len(groups),
    }
