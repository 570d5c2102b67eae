"""Samples laid end to end: what a packed forward pass reads and what a loss needs to find its tokens again.

Shapes: T tokens of the micro-batch with padding, N its response tokens, S its samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles.training.batch import COLUMNS, TrainBatch, offsets_of, ragged_index

PAD_TOKEN_ID = 0


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as tensors.

    Args:
        tokens_T: int64 token ids; the tail is padding.
        position_ids_T: int64, from 0 in each sequence.
        cu_seqlens: int32, where each sequence starts, with T as the last entry. Padding, if any, is the last sequence.
        max_seqlen: length of the longest sequence, padding included.
        logit_index_N: int64, the row of T whose logits predict each response token.
        target_N: int64 id of each response token.
        weight_N: float32 weight of each response token in the step's mean; 0 where masked. The sum over all
            micro-batches and data-parallel ranks of a step is 1, or 0 if the whole step is masked.
        mask_N: bool, True where the token is trained on.
        sample_N: int64, which of the S samples each response token belongs to.
        response_index_N: int64 on the CPU: the place of each response token in a flat per-response-token column of the
            batch it was packed from (`column[packed.response_index_N] = values_N` puts results back).
        columns: name to [N] tensor: the batch's per-response-token columns and the extra ones given to `pack`.
        sample_columns: name to [S] tensor: the batch's per-sample columns.
    """

    tokens_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    logit_index_N: torch.Tensor
    target_N: torch.Tensor
    weight_N: torch.Tensor
    mask_N: torch.Tensor
    sample_N: torch.Tensor
    response_index_N: torch.Tensor
    columns: dict[str, torch.Tensor]
    sample_columns: dict[str, torch.Tensor]


def pack(
    batch: TrainBatch,
    rows: Sequence[int],
    pad_multiple: int,
    device: torch.device | str,
    **extra_response_columns: torch.Tensor,
) -> PackedBatch:
    """Packs `rows` of a rank's batch, which has the column `token_weights`, into one micro-batch.

    Args:
        batch: a `TrainShard.batch`.
        rows: which of its rows, in which order.
        pad_multiple: T is padded to a multiple of this.
        device: where the tensors go.
        **extra_response_columns: flat tensors with one value for each response token of the whole batch
            (log-probabilities computed before, for example); what belongs to `rows` is picked from them.
    """
    rows = np.asarray(rows, dtype=np.int64)
    lengths, response_lengths = batch.total_lengths[rows], batch.response_lengths[rows]
    num_tokens = int(lengths.sum())
    padding = -num_tokens % pad_multiple
    sequence_lengths = np.append(lengths, padding) if padding else lengths
    sequence_offsets = offsets_of(sequence_lengths)

    tokens_T = np.full(num_tokens + padding, PAD_TOKEN_ID, dtype=np.int64)
    tokens_T[:num_tokens] = batch["tokens"][ragged_index(batch.token_offsets, rows)]
    position_ids_T = np.arange(num_tokens + padding) - np.repeat(sequence_offsets[:-1], sequence_lengths)

    # The response is the tail of its sequence: token j stands at end - response_length + j, its logits one row earlier.
    response_offsets = offsets_of(response_lengths)
    ends = sequence_offsets[1 : len(rows) + 1]
    shifts = ends - response_lengths - response_offsets[:-1]
    target_index_N = np.arange(response_offsets[-1]) + np.repeat(shifts, response_lengths)
    sample_N = np.repeat(np.arange(len(rows)), response_lengths)
    response_index_N = ragged_index(batch.response_offsets, rows)
    mask_N = batch["loss_masks"][response_index_N] > 0
    weight_N = np.where(mask_N, batch["token_weights"][rows][sample_N], np.float32(0))

    index_N = torch.from_numpy(response_index_N)
    columns = {
        name: torch.from_numpy(values[response_index_N]).to(device)
        for name, values in batch.columns.items()
        if COLUMNS[name].per == "response_token"
    }
    for name, values in extra_response_columns.items():
        assert values.shape == (batch.response_offsets[-1],), f"{name} has shape {tuple(values.shape)}"
        columns[name] = values[index_N.to(values.device)].to(device)
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens_T).to(device),
        position_ids_T=torch.from_numpy(position_ids_T).to(device),
        cu_seqlens=torch.from_numpy(sequence_offsets.astype(np.int32)).to(device),
        max_seqlen=int(sequence_lengths.max()),
        logit_index_N=torch.from_numpy(target_index_N - 1).to(device),
        target_N=torch.from_numpy(tokens_T[target_index_N]).to(device),
        weight_N=torch.from_numpy(weight_N).to(device),
        mask_N=torch.from_numpy(mask_N).to(device),
        sample_N=torch.from_numpy(sample_N).to(device),
        response_index_N=index_N,
        columns=columns,
        sample_columns={
            name: torch.from_numpy(values[rows]).to(device)
            for name, values in batch.columns.items()
            if COLUMNS[name].per == "sample"
        },
    )
