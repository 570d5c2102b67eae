"""What can be said about a rollout or an evaluation from its samples alone.

Lengths are those of samples; rewards are those of trajectories: samples that share one have one reward, which counts
once.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from miles.rollout.equal_rewards import all_same, rounded, same_reward
from miles.rollout.pass_at_k import mean_pass_at_k
from miles.rollout.sessions.tool_calls import tool_metrics
from miles.training.advantages.groups import counted_rewards
from miles.utils.errors import UserError
from miles.utils.types import Sample


def rollout_metrics(
    samples: Sequence[Sample], rewards: Sequence[float] | None, raw: Sequence[float | None] | None = None
) -> dict[str, float]:
    """The metrics `rollout/*` of `miles.tracking.metrics`.

    Args:
        samples: all samples of the rollout.
        rewards: the normalised reward of each, or None where nothing is rewarded: there are no reward metrics then.
        raw: the reward of each before that, None where it has none that counts. Unset: the samples' own.
    """
    if not samples:
        raise UserError("a rollout without samples has no metrics")
    metrics = {
        **_response_lengths("rollout/response_len", samples),
        "rollout/total_lengths": float(np.mean([len(sample.tokens) for sample in samples])),
        "rollout/truncated_ratio": _truncated_ratio(samples),
        "rollout/removed_ratio": float(np.mean([sample.remove_sample for sample in samples])),
    }
    if rewards is not None:
        metrics |= _rewards(samples, rewards, counted_rewards(samples) if raw is None else raw)
    # How likely the trainable tokens are to who wrote them, and to the teacher of on-policy distillation.
    metrics |= _mean_of_trained("rollout_log_probs", samples)
    metrics |= _mean_of_trained("teacher_log_probs", [sample for sample in samples if not sample.remove_sample])
    metrics |= tool_metrics(samples)
    if any(sample.weight_versions for sample in samples):
        mixed = [len(set(sample.weight_versions)) > 1 for sample in samples]
        metrics["rollout/weight_version/mixed_version_ratio"] = float(np.mean(mixed))
    return metrics


def eval_metrics(name: str, samples: Sequence[Sample], *, pass_rates: bool = False) -> dict[str, float]:
    """The metrics `eval/<name>*` of `miles.tracking.metrics` for one evaluation set.

    Args:
        name: of the set.
        samples: all of it, finished.
        pass_rates: also pass@k, of the samples that share a group_index.
    """
    if not samples:
        raise UserError(f"evaluation {name!r} has no samples")
    chosen = _one_a_trajectory(samples)
    rewards = [sample.reward for sample in chosen]
    metrics = {
        f"eval/{name}": _mean(rewards),
        f"eval/{name}-none_reward_ratio": _none_ratio(rewards),
        f"eval/{name}-truncated_ratio": _truncated_ratio(samples),
        f"eval/{name}-failed_ratio": float(np.mean([sample.status is Sample.Status.FAILED for sample in samples])),
        **_response_lengths(f"eval/{name}/response_len", samples),
    }
    if pass_rates:
        groups = defaultdict(list)
        for place, sample in enumerate(chosen):
            groups[place if sample.group_index is None else (sample.group_index,)].append(sample.reward)
        metrics |= {f"eval/{name}-pass@{k}": rate for k, rate in mean_pass_at_k(list(groups.values())).items()}
    return metrics


def _one_a_trajectory(samples: Sequence[Sample]) -> list[Sample]:
    """A piece of each trajectory, whose reward speaks for all: one that has a reward, if any has.

    A user's own evaluation may leave samples without an index, or group: each is a trajectory, or group, of its own.
    """
    chosen: dict[tuple, Sample] = {}
    for place, sample in enumerate(samples):
        key = (sample.group_index, sample.trajectory, place if sample.trajectory is None else None)
        if key not in chosen or chosen[key].reward is None:
            chosen[key] = sample
    return list(chosen.values())


def _mean_of_trained(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of that attribute at the trainable tokens of the samples that have it; {} where there are none."""
    scored = [(getattr(sample, name).array, sample) for sample in samples if getattr(sample, name) is not None]
    if not (count := sum(sample.trained_length for _, sample in scored)):
        return {}
    # In float64, sample by sample: all of it at once would take as much memory again.
    total = sum(float(values.sum(where=sample.mask > 0, dtype=np.float64)) for values, sample in scored)
    return {f"rollout/{name}": total / count}


def _rewards(samples: Sequence[Sample], rewards: Sequence[float], counted: Sequence[float | None]) -> dict[str, float]:
    chosen: dict[int | None, int] = {}
    for place, sample in enumerate(samples):
        # Pieces of a trajectory have one reward, but for those that are removed: one that counts speaks for all.
        if sample.trajectory not in chosen or counted[chosen[sample.trajectory]] is None:
            chosen[sample.trajectory] = place
    places = list(chosen.values())
    raw = [counted[place] for place in places]
    return {
        "rollout/raw_reward": _mean(raw),
        "rollout/rewards": float(np.mean([rewards[place] for place in places])),
        "rollout/none_reward_ratio": _none_ratio([samples[place].reward for place in places]),
        **_zero_std(raw, [samples[place].group_index for place in places]),
    }


def _mean(rewards: Sequence[float | None]) -> float:
    """Mean of the rewards that aren't None; NaN if all are."""
    known = [reward for reward in rewards if reward is not None]
    return float(np.mean(known)) if known else float("nan")


def _none_ratio(rewards: Sequence[float | None]) -> float:
    return float(np.mean([reward is None for reward in rewards]))


def _truncated_ratio(samples: Sequence[Sample]) -> float:
    return float(np.mean([sample.status is Sample.Status.TRUNCATED for sample in samples]))


def _response_lengths(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [sample.trained_length for sample in samples]
    statistics: dict[str, np.floating | np.integer] = {
        "mean": np.mean(lengths),
        "median": np.median(lengths),
        "max": np.max(lengths),
        "min": np.min(lengths),
    }
    return {f"{prefix}/{name}": float(statistic) for name, statistic in statistics.items()}


def _zero_std(rewards: Sequence[float | None], group_indices: Sequence[int | None]) -> dict[str, float]:
    """Groups that teach nothing, because all their members got the same reward.

    A reward of None is no member, and a group without two members has nothing that could differ: it is not counted.
    """
    groups = defaultdict(list)
    for group, reward in zip(group_indices, rewards, strict=True):
        if reward is not None:
            groups[group].append(reward)
    compared = [rewards for rewards in groups.values() if len(rewards) > 1]
    if not compared:
        return {}
    equal = [max(rewards) for rewards in compared if all_same(rewards)]
    counts = Counter(f"rollout/zero_std/count_{rounded(reward)}" for reward in equal)
    return {
        **{name: float(count) for name, count in sorted(counts.items())},
        "rollout/zero_std/all_zero_percentage": 100 * sum(same_reward(reward, 0) for reward in equal) / len(compared),
        "rollout/zero_std/all_one_percentage": 100 * sum(same_reward(reward, 1) for reward in equal) / len(compared),
    }
