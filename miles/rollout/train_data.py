"""The training data of a rollout as plain lists, and the checked training batch that it becomes.

The lists have one entry a sample, as `--custom-convert-samples-to-train-data-path` makes them.
"""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

import numpy as np

from miles.config import RunConfig
from miles.config.names import nearest
from miles.training.batch import COLUMNS, TrainRows, lists_from
from miles.utils.array_list import ArrayList, as_array
from miles.utils.columns import Column
from miles.utils.errors import UserError
from miles.utils.json_values import shown
from miles.utils.types import Sample

# What follows from the rest where a function leaves it out.
DEFAULTED = ("raw_reward", "truncated", "rollout_ids", "group_indices")


def train_data(samples: Sequence[Sample], rewards: Sequence[float] | None) -> dict[str, list[Any]]:
    """What Miles trains on, as lists with one entry a sample, for a convert function to change.

    tokens (prompt and response), response_lengths, loss_masks (0 or 1 a response token; all 0 for a sample that is
    removed or abstained), rollout_log_probs and teacher_log_probs if the samples have them, truncated (0 or 1),
    sample_indices, rollout_ids, group_indices; with rewards also rewards (those given) and raw_reward. An entry for
    each token is an `ArrayList`, a copy.

    Args:
        samples: finished.
        rewards: what each is trained with (`miles.rollout.reward_shaping.shaped_rewards`); None for supervised samples.
    """
    lists = lists_from(samples, rewards)
    data = {"tokens": lists.pop("tokens"), "response_lengths": lists.pop("response_lengths"), **lists}
    for name in _tokenwise():
        if any(entry is None for entry in data[name]):
            del data[name]
        else:
            data[name] = [ArrayList(np.array(entry)) for entry in data[name]]
    return data | {"truncated": [int(value) for value in data["truncated"]]}


def train_batch(
    config: RunConfig, samples: Sequence[Sample], raw: Sequence[float | None] | None, rewards: Sequence[float] | None
) -> TrainRows:
    """The rows of a rollout to train on.

    Args:
        config: the run's configuration.
        samples: finished.
        raw: the reward of each before it was shaped, None where it has none that counts; None for supervised samples.
        rewards: what each is trained with; None for supervised samples.
    """
    batch = TrainRows.from_samples(samples, rewards)
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


def batch_from(flag: str, data: Any, samples: Sequence[Sample], *, rewarded: bool) -> TrainRows:
    """The rows to train on of what the function at `flag` made of `samples`.

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
    required = ["tokens", "response_lengths", "loss_masks", "sample_indices", *(["rewards"] if rewarded else [])]
    for name, attribute in _tokenwise().items():
        if name not in required and any(getattr(sample, attribute) is not None for sample in samples):
            required.append(name)
    if missing := [name for name in required if name not in data]:
        raise UserError(f"{flag} returned no {', '.join(missing)}; it must return {', '.join(required)}")
    allowed = list(dict.fromkeys([*required, *_tokenwise(), "rewards", *DEFAULTED]))
    for name in data:
        if name not in allowed:
            raise UserError(
                f"{flag} returned {name!r}; it may return {', '.join(allowed)}{nearest(str(name), allowed)}"
            )
    lists = {name: _plain(values) for name, values in data.items()}
    sizes = {name: len(values) if isinstance(values, list) else shown(values) for name, values in lists.items()}
    if len(set(sizes.values())) != 1 or not all(isinstance(values, list) for values in lists.values()):
        raise UserError(f"{flag} must return lists of one entry a sample; it returned {_counts(sizes)}")

    indices = lists["sample_indices"] = _entries(flag, "sample_indices", lists["sample_indices"])
    lists.setdefault("rollout_ids", indices)
    lists.setdefault("truncated", [0] * len(indices))
    if "group_indices" not in lists:
        group_of = {sample.index: sample.group_index for sample in samples}
        if strange := set(indices) - set(group_of):
            raise UserError(f"{flag} returned sample_indices {min(strange)}, which no sample has, and no group_indices")
        lists["group_indices"] = [group_of[index] for index in indices]
    if rewarded:
        lists.setdefault("raw_reward", lists["rewards"])
    else:
        lists = {name: values for name, values in lists.items() if name not in ("rewards", "raw_reward")}
    lists = {name: _entries(flag, name, values) for name, values in lists.items()}
    for place, reward in enumerate(lists.get("raw_reward", ())):
        if isnan(reward):
            lists["loss_masks"][place] = np.zeros_like(lists["loss_masks"][place])
    _check_trajectories(flag, lists["rollout_ids"], samples)
    try:
        return TrainRows.from_lists(lists)
    except UserError as error:
        raise UserError(f"{flag} returned data that can't be trained on: {error}") from error


def _tokenwise() -> dict[str, str]:
    """The columns that have an entry for each token, or response token, and their attributes of a sample."""
    return {name: column.attribute for name, column in COLUMNS.items() if column.attribute and column.per != "sample"}


def _entries(flag: str, name: str, values: list[Any]) -> list[Any]:
    """The entries of a list, converted to what its column holds, and checked."""
    column = COLUMNS.get(name, Column(name, np.int64, "sample"))  # response_lengths become offsets, and no column
    kind = _reward if np.issubdtype(column.dtype, np.floating) else _integer
    entries: list[Any] = []
    for place, value in enumerate(values):
        what = f"{flag} returned {name}[{place}]"
        if column.per == "sample":
            entries.append(kind(what, _plain(value)))
        else:
            entries.append(as_array(value, what, column.dtype, column.dims))
    return entries


def _check_trajectories(flag: str, rollout_ids: Sequence[int], samples: Sequence[Sample]) -> None:
    made, asked = set(rollout_ids), {sample.trajectory for sample in samples}
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


def _integer(what: str, value: Any) -> int:
    if not isinstance(value, int):
        raise UserError(f"{what} = {shown(value)}; it must be an integer")
    return int(value)


def _reward(what: str, value: Any) -> float:
    if value is not None and not isinstance(value, int | float):
        raise UserError(f"{what} = {shown(value)}; it must be a number or None")
    return nan if value is None else float(value)


def _counts(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{size} {name}" for name, size in sizes.items())
