"""The training data of a rollout as plain lists, one entry a sample, as `--custom-convert-samples-to-train-data-path`
makes it; and the checked training batch that it becomes."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from miles.config import RunConfig
from miles.config.names import nearest
from miles.training.batch import TrainBatch
from miles.utils.errors import UserError
from miles.utils.json_values import shown
from miles.utils.types import Sample

REQUIRED = ("tokens", "response_lengths", "loss_masks", "sample_indices")
# Needed if there are rewards, or if the samples have such log-probabilities.
LOG_PROBS = ("rollout_log_probs", "teacher_log_probs")
OPTIONAL = ("rewards", "raw_reward", "truncated", "rollout_ids", "group_indices")
KEYS = (*REQUIRED, *LOG_PROBS, *OPTIONAL)


def train_data(samples: Sequence[Sample], rewards: Sequence[float] | None) -> dict[str, list[Any]]:
    """What Miles trains on, as lists with one entry a sample, for a convert function to change.

    tokens (prompt and response), response_lengths, loss_masks (0 or 1 a response token; all 0 for a sample that is
    removed or abstained), rollout_log_probs and teacher_log_probs if the samples have them, truncated (0 or 1),
    sample_indices, rollout_ids, group_indices; with rewards also rewards (those given) and raw_reward.

    Args:
        samples: finished.
        rewards: what each is trained with (`miles.rollout.reward_shaping.shaped_rewards`); None for supervised samples.
    """
    counted = [not sample.remove_sample and (rewards is None or sample.reward is not None) for sample in samples]
    masks = [[1] * s.response_length if s.loss_mask is None else list(s.loss_mask) for s in samples]
    data = {
        "tokens": [list(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [mask if counts else [0] * len(mask) for mask, counts in zip(masks, counted, strict=True)],
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.trajectory for sample in samples],
        "group_indices": [sample.group_index for sample in samples],
    }
    for name in LOG_PROBS:
        if all(getattr(sample, name) is not None for sample in samples):
            data[name] = [list(getattr(sample, name)) for sample in samples]
    if rewards is not None:
        data["rewards"] = list(rewards)
        data["raw_reward"] = [sample.reward for sample in samples]
    return data


def train_batch(
    config: RunConfig, samples: Sequence[Sample], raw: Sequence[float | None] | None, rewards: Sequence[float] | None
) -> TrainBatch:
    """The training batch of a rollout.

    Args:
        config: the run's configuration.
        samples: finished.
        raw: the reward of each before it was shaped, None where it has none that counts; None for supervised samples.
        rewards: what each is trained with; None for supervised samples.
    """
    batch = TrainBatch.from_samples(samples, rewards)
    if raw is None:
        return batch
    return batch.with_columns(raw_reward=[float("nan") if reward is None else reward for reward in raw])


def check_log_probs(samples: Sequence[Sample]) -> None:
    """Raise UserError where samples that an engine wrote have no log-probabilities."""
    missing = [sample.index for sample in samples if sample.rollout_log_probs is None]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(samples)} samples have no rollout_log_probs, sample {missing[0]} first: what "
            "generates a sample must set them, one a response token"
        )


def batch_from(flag: str, data: Any, samples: Sequence[Sample], *, rewarded: bool) -> TrainBatch:
    """The training batch of what the function at `flag` made of `samples`.

    Keys and values are those of `train_data`. The function may leave out raw_reward (then it is rewards), truncated
    (then 0), rollout_ids (then sample_indices) and group_indices (then those of the samples with these indices).

    Args:
        rewarded: whether there must be rewards.

    Raises:
        ValueError: a key is missing or unknown, lists differ in length, values contradict each other, or the data has
            other trajectories than the samples.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{flag} returned {shown(data)}; it must return a dict of lists")
    required = [*REQUIRED, *(["rewards"] if rewarded else [])]
    required += [name for name in LOG_PROBS if any(getattr(sample, name) is not None for sample in samples)]
    if missing := [name for name in required if name not in data]:
        raise UserError(f"{flag} returned no {', '.join(missing)}; it must return {', '.join(required)}")
    for name in data:
        if name not in KEYS:
            raise UserError(f"{flag} returned {name!r}; it may return {', '.join(KEYS)}{nearest(str(name), KEYS)}")
    lists = {name: _plain(values) for name, values in data.items()}
    sizes = {name: len(values) if isinstance(values, list) else shown(values) for name, values in lists.items()}
    if len(set(sizes.values())) != 1 or not all(isinstance(values, list) for values in lists.values()):
        raise UserError(f"{flag} must return lists of one entry a sample; it returned {_counts(sizes)}")

    indices = _integers(flag, "sample_indices", lists["sample_indices"])
    lists.setdefault("rollout_ids", indices)
    lists.setdefault("truncated", [0] * len(indices))
    if "group_indices" not in lists:
        group_of = {sample.index: sample.group_index for sample in samples}
        if strange := set(indices) - set(group_of):
            raise UserError(f"{flag} returned sample_indices {min(strange)}, which no sample has, and no group_indices")
        lists["group_indices"] = [group_of[index] for index in indices]
    rewards = lists.get("rewards") if rewarded else None
    rows = _rows(flag, lists, rewards)
    _check_trajectories(flag, rows, samples)
    try:
        return TrainBatch.from_samples(rows, rewards)
    except UserError as error:
        raise UserError(f"{flag} returned data that can't be trained on: {error}") from error


def _rows(flag: str, lists: Mapping[str, list[Any]], rewards: list[Any] | None) -> list[Sample]:
    """The lists as samples, which `TrainBatch.from_samples` checks."""

    def of(name: str, place: int, check: Any) -> Any:
        return None if name not in lists else check(flag, f"{name}[{place}]", _plain(lists[name][place]))

    raw = "raw_reward" if "raw_reward" in lists else "rewards"
    return [
        Sample(
            index=index,
            group_index=of("group_indices", place, _integer),
            rollout_id=of("rollout_ids", place, _integer),
            tokens=of("tokens", place, _integers),
            response_length=of("response_lengths", place, _integer),
            loss_mask=of("loss_masks", place, _integers),
            rollout_log_probs=of("rollout_log_probs", place, _numbers),
            teacher_log_probs=of("teacher_log_probs", place, _numbers),
            reward=None if rewards is None else of(raw, place, _reward),
            status=Sample.Status.TRUNCATED if of("truncated", place, _integer) else Sample.Status.COMPLETED,
        )
        for place, index in enumerate(lists["sample_indices"])
    ]


def _check_trajectories(flag: str, rows: Sequence[Sample], samples: Sequence[Sample]) -> None:
    made, asked = ({sample.trajectory for sample in part} for part in (rows, samples))
    if made != asked:
        raise UserError(
            f"{flag} returned {len(made)} rollout_ids for {len(asked)} trajectories, {len(asked - made)} of which are "
            f"missing and {len(made - asked)} unknown; it must return them all: a loss mask of zeros leaves one out"
        )


def _plain(values: Any) -> Any:
    """Arrays, tensors and tuples as lists."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, tuple) else values


def _integer(flag: str, place: str, value: Any) -> int:
    if not isinstance(value, int):
        raise UserError(f"{flag} returned {place} = {shown(value)}; it must be an integer")
    return int(value)


def _integers(flag: str, place: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise UserError(f"{flag} returned {place} = {shown(values)}; it must be a list of integers")
    return values


def _numbers(flag: str, place: str, values: Any) -> list[float]:
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise UserError(f"{flag} returned {place} = {shown(values)}; it must be a list of numbers")
    return values


def _reward(flag: str, place: str, value: Any) -> float | None:
    if value is not None and not isinstance(value, int | float):
        raise UserError(f"{flag} returned {place} = {shown(value)}; it must be a number or None")
    return None if value is None or isnan(value) else value


def _counts(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{size} {name}" for name, size in sizes.items())
