"""Small batches and micro-batches for tests of losses."""

import numpy as np
import torch

from miles.training.batch import COLUMNS, TrainBatch, TrainRows, offsets_of
from miles.training.packing import PackedBatch, pack
from miles.training.sample_sums import SampleSums
from miles.training.schedule import plan_rollout, shard

VOCAB = 11


def make_batch(masks: list[list[int]], seed: int = 0) -> TrainBatch:
    """Prompts of two tokens, then one response token for each entry of a sample's mask."""
    rng = np.random.default_rng(seed)
    response_lengths = np.array([len(mask) for mask in masks])
    rows = np.arange(len(masks))
    columns = {
        "tokens": rng.integers(0, VOCAB, size=response_lengths.sum() + 2 * len(masks)).astype(np.int32),
        "loss_masks": np.concatenate(masks).astype(np.int8),
        "rollout_log_probs": rng.normal(-2, 0.3, size=response_lengths.sum()).astype(np.float32),
        "truncated": np.zeros(len(rows), dtype=np.int64),
        "sample_indices": rows,
        "group_indices": rows // 2,
        "rollout_ids": rows,
    }
    return TrainBatch(columns, offsets_of(response_lengths + 2), offsets_of(response_lengths))


def rows_of(batch: TrainBatch) -> TrainRows:
    """The batch as a whole rollout's rows."""
    columns = {
        name: values if COLUMNS[name].per == "sample" else [batch.row(name, row) for row in range(len(batch))]
        for name, values in batch.columns.items()
    }
    return TrainRows(columns, batch.total_lengths, batch.response_lengths)


def whole_step(
    masks: list[list[int]], per_token_loss: bool = False, constant_length: int | None = None, **columns: torch.Tensor
) -> PackedBatch:
    """A step of one micro-batch. `columns` has flat or nested values of the response tokens, masked ones too."""
    batch = rows_of(make_batch(masks))
    flat = {name: torch.as_tensor(values, dtype=torch.float32).flatten() for name, values in columns.items()}
    plan = plan_rollout(
        batch,
        global_batch_size=len(batch),
        dp_size=1,
        micro_batch_size=len(batch),
        max_tokens=None,
        per_token_loss=per_token_loss,
        constant_length=constant_length,
    )
    part = shard(batch, plan, 0)
    return pack(part.batch, part.steps[0].micro_batches[0], 1, "cpu", **flat)


def sums_of(masks: list[list[int]]) -> SampleSums:
    """Of a micro-batch with these masks, on one rank."""
    return SampleSums(whole_step(masks), None)


def nested(x_N: torch.Tensor, masks: list[list[int]]) -> list[list[float]]:
    """One list a sample."""
    return [part.tolist() for part in x_N.split([len(mask) for mask in masks])]
