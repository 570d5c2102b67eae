"""The training batch: a typed table on numpy, one row a sample, and its parts, which are sent to the trainers.

`TrainRows` is a rollout as its samples hold it. `TrainBatch` is a part of it, laid end to end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.utils.array_list import as_array, joined
from miles.utils.columns import Column, columns_of
from miles.utils.errors import UserError
from miles.utils.types import Sample

COLUMNS = {
    column.name: column
    for column in (
        *columns_of(Sample).values(),
        Column("rewards", np.float32, "sample"),
        Column("raw_reward", np.float32, "sample", "reward"),
        Column("truncated", np.int64, "sample", "is_truncated", required=True),
        Column("sample_indices", np.int64, "sample", "index", required=True),
        Column("group_indices", np.int64, "sample", "group_index", required=True),
        Column("rollout_ids", np.int64, "sample", "trajectory", required=True),
        # 1 where a token was written by older weights than those of the last sync; no column: nowhere.
        Column("stale", np.int64, "sample"),
        # Of the plan of optimizer steps (`miles.training.schedule`).
        Column("token_weights", np.float32, "sample"),
        Column("metric_weights", np.float32, "sample"),
        # Of a trainer's passes over its shard, and what is made of them (`miles.training.rollout_columns`).
        Column("old_log_probs", np.float32, "response_token"),
        Column("ref_log_probs", np.float32, "response_token"),
        Column("entropy", np.float32, "response_token"),
        Column("values", np.float32, "response_token"),
        Column("advantages", np.float32, "response_token"),
        Column("returns", np.float32, "response_token"),
        Column("opd_reverse_kl", np.float32, "response_token"),
    )
}


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where each row of a flat ragged column starts, with the total as the last entry: int64 [rows + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_index(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Positions of the values of `rows`, in that order, in a flat ragged column: int64 [their total length]."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    local_starts = offsets_of(lengths)
    return np.repeat(starts - local_starts[:-1], lengths) + np.arange(local_starts[-1])


@dataclass(frozen=True)
class TrainBatch:
    """Samples as columns. A ragged column is one flat array, cut by `token_offsets` or `response_offsets`.

    Args:
        columns: column name to flat array, of the dtypes in `COLUMNS`.
        token_offsets: int64 [samples + 1], cuts the per-token columns.
        response_offsets: int64 [samples + 1], cuts the per-response-token columns.
    """

    columns: Mapping[str, np.ndarray]
    token_offsets: np.ndarray
    response_offsets: np.ndarray

    def __post_init__(self):
        missing = [name for name, column in COLUMNS.items() if column.required and name not in self.columns]
        assert not missing, f"columns {missing} are missing"
        sizes = {"token": self.token_offsets[-1], "response_token": self.response_offsets[-1], "sample": len(self)}
        assert len(self.response_offsets) == len(self.token_offsets)
        for name, values in self.columns.items():
            column = COLUMNS[name]
            assert values.dtype == column.dtype, f"column {name} is {values.dtype}, not {column.dtype}"
            assert values.ndim == 1 + len(column.dims) and len(values) == sizes[column.per], (
                f"column {name} has shape {values.shape}, not [{sizes[column.per]}, {', '.join(column.dims)}]"
            )

    def __len__(self) -> int:
        return len(self.token_offsets) - 1

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def total_lengths(self) -> np.ndarray:
        """Tokens of each sample, prompt and response: int64 [samples]."""
        return np.diff(self.token_offsets)

    @property
    def response_lengths(self) -> np.ndarray:
        """Response tokens of each sample: int64 [samples]."""
        return np.diff(self.response_offsets)

    def row(self, name: str, index: int) -> np.ndarray | np.generic:
        """The values of one sample in one column."""
        values, per = self.columns[name], COLUMNS[name].per
        if per == "sample":
            return values[index]
        offsets = self.token_offsets if per == "token" else self.response_offsets
        return values[offsets[index] : offsets[index + 1]]

    def with_columns(self, **columns: np.ndarray) -> "TrainBatch":
        """The same batch with these columns added or replaced; values are cast to the declared dtype."""
        added = {name: np.asarray(values, dtype=COLUMNS[name].dtype) for name, values in columns.items()}
        return TrainBatch({**self.columns, **added}, self.token_offsets, self.response_offsets)


@dataclass(frozen=True)
class TrainRows:
    """A rollout to train on, a row a sample. Its arrays are those of the samples: `select` is what copies them.

    Args:
        columns: by name. A column per token or response token is a list of one array a row; one per sample is an array.
        total_lengths: int64 [rows], tokens of each, prompt and response.
        response_lengths: int64 [rows], response tokens of each.
    """

    columns: Mapping[str, Any]
    total_lengths: np.ndarray
    response_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.total_lengths)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    @property
    def mask_sums(self) -> np.ndarray:
        """Unmasked response tokens of each row: int64 [rows]."""
        return np.array([np.count_nonzero(mask) for mask in self.columns["loss_masks"]], dtype=np.int64)

    def select(self, rows: Sequence[int] | np.ndarray) -> TrainBatch:
        """The batch of `rows`, in their order."""
        rows = np.asarray(rows, dtype=np.int64)
        places = rows.tolist()

        def of(column: Column) -> np.ndarray:
            values = self.columns[column.name]
            if column.per == "sample":
                return values[rows]
            nothing = np.empty((0,) * (1 + len(column.dims)), column.dtype)
            return joined([nothing, *(values[place] for place in places)])

        return TrainBatch(
            columns={name: of(COLUMNS[name]) for name in self.columns},
            token_offsets=offsets_of(self.total_lengths[rows]),
            response_offsets=offsets_of(self.response_lengths[rows]),
        )

    def with_columns(self, **columns: Any) -> "TrainRows":
        """The same rows with these columns added or replaced, one entry a row; they are cast to the declared type."""
        added = {name: _typed(COLUMNS[name], values) for name, values in columns.items()}
        return TrainRows({**self.columns, **added}, self.total_lengths, self.response_lengths)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], rewards: Sequence[float] | None) -> "TrainRows":
        """The rows of samples, in the given order.

        A sample with `remove_sample`, or with reward None where there are rewards, gets a loss mask of zeros: it has no
        gradient and no part in any mean.

        Args:
            samples: finished samples; `reward` a number or None (abstained).
            rewards: what `shape_rewards` made of each sample's reward, or None for supervised samples.

        Raises:
            ValueError: a sample that can't be trained on, with its index and the reason.
        """
        if not samples:
            raise UserError("a training batch needs at least one sample, got none")
        if rewards is not None and len(rewards) != len(samples):
            raise UserError(f"got {len(rewards)} rewards for {len(samples)} samples")
        for sample in samples:
            _check_sample(sample)
        return cls.from_lists(lists_from(samples, rewards))

    @classmethod
    def from_lists(cls, lists: Mapping[str, Sequence[Any]]) -> "TrainRows":
        """The rows of lists of one entry a row, named as columns are, and `response_lengths`.

        Raises:
            ValueError: entries of the wrong type, or that contradict each other; the row is named.
        """
        columns = {}
        for column in COLUMNS.values():
            values = lists.get(column.name)
            if values is None:
                assert not column.required, f"column {column.name} is missing"
            elif column.per == "sample" or not (absent := sum(value is None for value in values)):
                columns[column.name] = _typed(column, values)
            elif absent < len(values):
                there = len(values) - absent
                raise UserError(f"{there} of {len(values)} samples have {column.name}: all or none must")
        total_lengths = np.array([len(tokens) for tokens in columns["tokens"]], dtype=np.int64)
        rows = cls(columns, total_lengths, np.array(lists["response_lengths"], dtype=np.int64))
        _check_rows(rows)
        return rows


def lists_from(samples: Sequence[Sample], rewards: Sequence[float] | None) -> dict[str, list[Any]]:
    """Each column that comes from samples, and `rewards`, as a list of one entry a sample; arrays are not copied.

    Where a sample lacks what not every batch has, its entry is None.
    """
    lists = {
        column.name: [getattr(sample, column.attribute) for sample in samples]
        for column in COLUMNS.values()
        if column.attribute is not None
    }
    lists["response_lengths"] = [sample.response_length for sample in samples]
    counted = [not sample.remove_sample and (rewards is None or sample.reward is not None) for sample in samples]
    lists["loss_masks"] = [
        sample.mask if counts else np.broadcast_to(np.int8(0), sample.response_length)
        for sample, counts in zip(samples, counted, strict=True)
    ]
    if rewards is None:
        del lists["raw_reward"]
    else:
        lists["rewards"] = list(rewards)
    return lists


def _typed(column: Column, values: Sequence[Any]) -> Any:
    if column.per == "sample":
        return np.array([np.nan if value is None else value for value in values], dtype=column.dtype)
    return [as_array(value, f"{column.name}[{row}]", column.dtype, column.dims) for row, value in enumerate(values)]


def _check_rows(rows: TrainRows) -> None:
    """Raise UserError, with the row's numbers, if the lengths of its parts or the values of columns can't be."""
    for row, (tokens, response) in enumerate(zip(rows.total_lengths, rows.response_lengths, strict=True)):

        def refused(words: str, row: int = row) -> UserError:
            return UserError(f"sample {rows['sample_indices'][row]} of group {rows['group_indices'][row]}: {words}")

        if not 0 <= response <= tokens:
            raise refused(f"response_length {response} does not fit {tokens} tokens")
        for name, values in rows.columns.items():
            column = COLUMNS[name]
            length, what = (response, "a response") if column.per == "response_token" else (tokens, "a sample")
            if column.per != "sample" and len(values[row]) != length:
                part = column.attribute or name
                raise refused(f"{part} has {len(values[row])} entries for {what} of {length} tokens")
        if tokens == response:
            raise refused("the prompt has no tokens; nothing predicts the first token of the response")
        mask = rows["loss_masks"][row]
        if mask.view(np.uint8).max(initial=0) > 1:
            raise refused(f"loss_mask holds {np.unique(mask).tolist()}; only 0 and 1 are allowed")
    _check_rollouts(rows["rollout_ids"], rows["group_indices"])
    if "rewards" in rows and (bad := np.sum(~np.isfinite(rows["rewards"]))):
        raise UserError(f"{bad} of {len(rows)} rewards aren't finite numbers")


def _check_rollouts(rollout_ids: np.ndarray, group_indices: np.ndarray) -> None:
    _, first, rollout = np.unique(rollout_ids, return_index=True, return_inverse=True)
    stray = np.flatnonzero(group_indices != group_indices[first][rollout])
    if len(stray):
        groups = np.unique(group_indices[rollout_ids == rollout_ids[stray[0]]]).tolist()
        raise UserError(
            f"rollout_id {rollout_ids[stray[0]]} is shared by samples of the groups {groups}: only pieces of one "
            "trajectory may share it; a sample without one has its index as rollout_id"
        )


def _check_sample(sample: Sample) -> None:
    name = f"sample {sample.index} of group {sample.group_index}"
    if sample.index is None or sample.group_index is None:
        raise UserError(f"{name}: a sample to train on needs an index and a group_index; the data source sets them")
    if sample.status is Sample.Status.PENDING:
        raise UserError(f"{name}: status is pending; only samples that were generated can be trained on")
    sample.validate()
