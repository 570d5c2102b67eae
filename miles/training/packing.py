"""Samples laid end to end: what a packed forward pass reads and what a loss needs to find its tokens again.

Shapes: T tokens of the micro-batch with padding, N its response tokens, S its samples; under context parallelism T and
N are this rank's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles.training.batch import COLUMNS, TrainBatch, offsets_of, ragged_index


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch as tensors, or a context-parallel rank's part of it: of each sequence its `zigzag_spans`.

    A rank has those response tokens that its rows predict; each is one rank's.

    Args:
        tokens_T: int64 token ids; the tail is padding, and so is the end of a sequence under context parallelism: 0.
        position_ids_T: int64, from 0 in each sequence.
        real_T: bool, False at padding.
        cu_seqlens: int32 on the CPU, where each sequence of the whole micro-batch starts, with the number of all tokens
            as the last entry. Padding behind the samples, if any, is the last sequence.
        max_seqlen: length of the longest sequence, padding included.
        logit_index_N: int64, the row of T whose logits predict each response token.
        target_N: int64 id of each response token.
        weight_N: float32 weight of each response token in the step's mean; 0 where masked. The sum over all
            micro-batches, data-parallel and context-parallel ranks of a step is 1, or 0 if the whole step is masked;
            with --constant-loss-length it is another.
        metric_weight_N: float32 weight of each response token in the step's mean of a metric: as `weight_N`, but its
            sum is 1 with --constant-loss-length, too.
        mask_N: bool, True where the token is trained on.
        sample_N: int64, which of the S samples each response token belongs to.
        response_index_N: int64 on the CPU: the place of each response token in a flat per-response-token column of the
            batch it was packed from (`column[packed.response_index_N] = values_N` puts results back).
        columns: name to [N, ...] tensor: the batch's per-response-token columns and the extra ones given to `pack`.
        token_columns: name to [T, ...] tensor: the batch's per-token columns but for the ids, 0 at padding.
        sample_columns: name to [S] tensor: the batch's per-sample columns.
    """

    tokens_T: torch.Tensor
    position_ids_T: torch.Tensor
    real_T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    logit_index_N: torch.Tensor
    target_N: torch.Tensor
    weight_N: torch.Tensor
    metric_weight_N: torch.Tensor
    mask_N: torch.Tensor
    sample_N: torch.Tensor
    response_index_N: torch.Tensor
    columns: dict[str, torch.Tensor]
    token_columns: dict[str, torch.Tensor]
    sample_columns: dict[str, torch.Tensor]


def pack(
    batch: TrainBatch,
    rows: Sequence[int],
    pad_multiple: int,
    device: torch.device | str,
    cp_rank: int = 0,
    cp_size: int = 1,
    **extra_response_columns: torch.Tensor,
) -> PackedBatch:
    """Packs `rows` of a rank's batch, which has the weights of `shard`, into one micro-batch.

    Args:
        batch: a `TrainShard.batch`.
        rows: which of its rows, in which order.
        pad_multiple: T is padded to a multiple of this.
        device: where the tensors go.
        cp_rank, cp_size: this rank's number among the context-parallel ranks, and how many they are.
        **extra_response_columns: declared in `COLUMNS`, flat tensors with one entry for each response token of the
            whole batch, of a trainer's pass over it for example; what belongs to `rows` is picked from them.
    """
    rows_S = np.asarray(rows, dtype=np.int64)
    lengths, response_lengths = batch.total_lengths[rows_S], batch.response_lengths[rows_S]
    # Context-parallel ranks cut every sequence into 2 * cp_size equal chunks.
    piece = 1 if cp_size == 1 else 2 * cp_size
    sequence_lengths = -(lengths // -piece) * piece
    padding = -int(sequence_lengths.sum()) % math.lcm(piece, pad_multiple * cp_size)
    if padding:
        sequence_lengths = np.append(sequence_lengths, padding)
    sequence_offsets = offsets_of(sequence_lengths)
    starts, num_tokens = sequence_offsets[: len(rows_S)], sequence_offsets[-1]

    place_T, index_T = ranges(starts, lengths), ragged_index(batch.token_offsets, rows_S)

    def laid_out(values: np.ndarray) -> np.ndarray:
        """A per-token column of the batch in the whole micro-batch, 0 at padding."""
        result = np.zeros((num_tokens, *values.shape[1:]), values.dtype)
        result[place_T] = values[index_T]
        return result

    tokens, real = laid_out(batch["tokens"]).astype(np.int64), np.zeros(num_tokens, dtype=bool)
    real[place_T] = True
    position_ids = np.arange(num_tokens) - np.repeat(sequence_offsets[:-1], sequence_lengths)
    held_T = _held_tokens(sequence_offsets, cp_rank, cp_size)
    # A token's row in this rank's part, or -1.
    row_of = np.full(num_tokens, -1)
    row_of[held_T] = np.arange(len(held_T))

    # The response is the tail of its sequence: token j stands at end - response_length + j, its logits one row earlier.
    target_index_N = ranges(starts + lengths - response_lengths, response_lengths)
    sample_N = np.repeat(np.arange(len(rows_S)), response_lengths)
    response_index_N = ragged_index(batch.response_offsets, rows_S)
    here_N = row_of[target_index_N - 1] >= 0
    target_index_N, sample_N, response_index_N = (x[here_N] for x in (target_index_N, sample_N, response_index_N))
    mask_N = batch["loss_masks"][response_index_N] > 0

    def of(per: str) -> dict[str, np.ndarray]:
        return {name: values for name, values in batch.columns.items() if COLUMNS[name].per == per}

    def spread(name: str) -> torch.Tensor:
        return torch.from_numpy(np.where(mask_N, batch[name][rows_S][sample_N], np.float32(0))).to(device)

    index_N = torch.from_numpy(response_index_N)
    columns = {
        name: torch.from_numpy(values[response_index_N]).to(device) for name, values in of("response_token").items()
    }
    for name, values in extra_response_columns.items():
        column = COLUMNS[name]
        fits = column.per == "response_token" and values.ndim == 1 + len(column.dims)
        assert fits and len(values) == batch.response_offsets[-1], f"{name} has shape {tuple(values.shape)}"
        columns[name] = values[index_N.to(values.device)].to(device)
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens[held_T]).to(device),
        position_ids_T=torch.from_numpy(position_ids[held_T]).to(device),
        real_T=torch.from_numpy(real[held_T]).to(device),
        cu_seqlens=torch.from_numpy(sequence_offsets.astype(np.int32)),
        max_seqlen=int(sequence_lengths.max()),
        logit_index_N=torch.from_numpy(row_of[target_index_N - 1]).to(device),
        target_N=torch.from_numpy(tokens[target_index_N]).to(device),
        weight_N=spread("token_weights"),
        metric_weight_N=spread("metric_weights"),
        mask_N=torch.from_numpy(mask_N).to(device),
        sample_N=torch.from_numpy(sample_N).to(device),
        response_index_N=index_N,
        columns=columns,
        token_columns={
            name: torch.from_numpy(laid_out(values)[held_T]).to(device)
            for name, values in of("token").items()
            if name != "tokens"
        },
        sample_columns={name: torch.from_numpy(values[rows_S]).to(device) for name, values in of("sample").items()},
    )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ..., start + length - 1 of every range, laid end to end."""
    return np.arange(lengths.sum()) + np.repeat(starts - offsets_of(lengths)[:-1], lengths)


def zigzag_spans(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """The parts (start, end) of a sequence that a context-parallel rank holds, in order.

    Of 2 * size chunks they are chunk `rank` and the one as far from the end: under causal attention every rank then
    has as much to do. One rank holds the sequence as it is. `length` is a multiple of 2 * size, else of nothing.
    """
    if size == 1:
        return [(0, length)]
    assert length % (2 * size) == 0, f"a sequence of {length} tokens is not padded for {size} context-parallel ranks"
    chunk, mirror = length // (2 * size), 2 * size - 1 - rank
    return [(rank * chunk, (rank + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk)]


def _held_tokens(sequence_offsets: np.ndarray, cp_rank: int, cp_size: int) -> np.ndarray:
    """The places in the whole micro-batch of a rank's tokens, in their order."""
    lengths = np.diff(sequence_offsets)
    spans = np.array([zigzag_spans(length, cp_rank, cp_size) for length in lengths.tolist()])
    return ranges((sequence_offsets[:-1, None] + spans[..., 0]).flatten(), (spans[..., 1] - spans[..., 0]).flatten())
