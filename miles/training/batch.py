"""The training batch: a typed table on numpy, one row a sample, built once from Samples and sent to the trainers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.utils.types import Sample


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Args:
        name: the column's name, as Miles calls it.
        dtype: numpy dtype of its values.
        per: one value a "token" (prompt and response), a "response_token", or a "sample".
        required: whether every batch has it.
    """

    name: str
    dtype: type
    per: Literal["token", "response_token", "sample"]
    required: bool = False


COLUMNS = {
    column.name: column
    for column in (
        Column("tokens", np.int64, "token", required=True),
        Column("loss_masks", np.int32, "response_token", required=True),
        Column("rollout_log_probs", np.float32, "response_token"),
        Column("teacher_log_probs", np.float32, "response_token"),
        Column("rewards", np.float32, "sample"),
        Column("raw_reward", np.float32, "sample"),
        Column("truncated", np.int64, "sample", required=True),
        Column("sample_indices", np.int64, "sample", required=True),
        Column("group_indices", np.int64, "sample", required=True),
        Column("rollout_ids", np.int64, "sample", required=True),
        # 1 where a token was written by older weights than those of the last sync; no column: nowhere.
        Column("stale", np.int64, "sample"),
        Column("token_weights", np.float32, "sample"),
        Column("metric_weights", np.float32, "sample"),
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
            dtype, shape = COLUMNS[name].dtype, (sizes[COLUMNS[name].per],)
            assert values.dtype == dtype, f"column {name} is {values.dtype}, not {dtype}"
            assert values.shape == shape, f"column {name} has shape {values.shape}, not {shape}"

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

    @property
    def mask_sums(self) -> np.ndarray:
        """Unmasked response tokens of each sample: int64 [samples]."""
        sums = np.zeros(len(self), dtype=np.int64)
        held = self.response_lengths > 0
        if held.any():
            # In the column's own type: adding up in another is many times slower.
            starts = self.response_offsets[:-1][held]
            sums[held] = np.add.reduceat(self.columns["loss_masks"], starts, dtype=np.int32)
        return sums

    def row(self, name: str, index: int) -> np.ndarray | np.generic:
        """The values of one sample in one column."""
        values, per = self.columns[name], COLUMNS[name].per
        if per == "sample":
            return values[index]
        offsets = self.token_offsets if per == "token" else self.response_offsets
        return values[offsets[index] : offsets[index + 1]]

    def select(self, rows: Sequence[int] | np.ndarray) -> "TrainBatch":
        """A new batch of `rows`, in their order."""
        rows = np.asarray(rows, dtype=np.int64)
        index = {
            "token": ragged_index(self.token_offsets, rows),
            "response_token": ragged_index(self.response_offsets, rows),
            "sample": rows,
        }
        return TrainBatch(
            columns={name: values[index[COLUMNS[name].per]] for name, values in self.columns.items()},
            token_offsets=offsets_of(self.total_lengths[rows]),
            response_offsets=offsets_of(self.response_lengths[rows]),
        )

    def with_columns(self, **columns: np.ndarray) -> "TrainBatch":
        """The same batch with these columns added or replaced; values are cast to the declared dtype."""
        added = {name: np.asarray(values, dtype=COLUMNS[name].dtype) for name, values in columns.items()}
        return TrainBatch({**self.columns, **added}, self.token_offsets, self.response_offsets)

    @classmethod
    def from_samples(cls, samples: Sequence["Sample"], rewards: Sequence[float] | None) -> "TrainBatch":
        """Builds the table, a row a sample in the given order.

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
        response_lengths = np.array([sample.response_length for sample in samples], dtype=np.int64)
        masks = [[1] * s.response_length if s.loss_mask is None else s.loss_mask for s in samples]
        counted = np.array([not s.remove_sample and (rewards is None or s.reward is not None) for s in samples])
        columns = {
            "tokens": _flat((sample.tokens for sample in samples), np.int64),
            "loss_masks": _flat(masks, np.int32) * np.repeat(counted, response_lengths),
            "truncated": np.array([sample.status.value == "truncated" for sample in samples], dtype=np.int64),
            "sample_indices": np.array([sample.index for sample in samples], dtype=np.int64),
            "group_indices": np.array([sample.group_index for sample in samples], dtype=np.int64),
            "rollout_ids": np.array([sample.trajectory for sample in samples], dtype=np.int64),
        }
        _check_rollouts(columns["rollout_ids"], columns["group_indices"])
        log_probs = {
            "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
            "teacher_log_probs": [sample.teacher_log_probs for sample in samples],
        }
        for name, values in log_probs.items():
            given = sum(value is not None for value in values)
            if given not in (0, len(samples)):
                raise UserError(f"{given} of {len(samples)} samples have {name}: all or none must")
            if given:
                columns[name] = _flat(values, np.float32)
        if rewards is not None:
            raw = [np.nan if sample.reward is None else sample.reward for sample in samples]
            columns["raw_reward"] = np.array(raw, dtype=np.float32)
            columns["rewards"] = np.array(rewards, dtype=np.float32)
            if not np.isfinite(columns["rewards"]).all():
                bad = np.sum(~np.isfinite(columns["rewards"]))
                raise UserError(f"{bad} of {len(samples)} rewards aren't finite numbers")
        total_lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
        return cls(columns, offsets_of(total_lengths), offsets_of(response_lengths))


def _flat(rows, dtype) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])


def _check_rollouts(rollout_ids: np.ndarray, group_indices: np.ndarray) -> None:
    _, first, rollout = np.unique(rollout_ids, return_index=True, return_inverse=True)
    stray = np.flatnonzero(group_indices != group_indices[first][rollout])
    if len(stray):
        groups = np.unique(group_indices[rollout_ids == rollout_ids[stray[0]]]).tolist()
        raise UserError(
            f"rollout_id {rollout_ids[stray[0]]} is shared by samples of the groups {groups}: only pieces of one "
            "trajectory may share it; a sample without one has its index as rollout_id"
        )


def _check_sample(sample: "Sample") -> None:
    name = f"sample {sample.index} of group {sample.group_index}"
    if sample.index is None or sample.group_index is None:
        raise UserError(f"{name}: a sample to train on needs an index and a group_index; the data source sets them")
    if sample.status.value == "pending":
        raise UserError(f"{name}: status is pending; only samples that were generated can be trained on")
    sample.validate()
    if sample.prompt_length < 1:
        raise UserError(f"{name}: the prompt has no tokens; nothing predicts the first token of the response")
    if sample.loss_mask is not None and not set(sample.loss_mask) <= {0, 1}:
        raise UserError(f"{name}: loss_mask holds {sorted(set(sample.loss_mask))}; only 0 and 1 are allowed")
