"""Attention on a GPU, with memory that grows with the number of tokens: flash attention, or a compiled kernel.

Shapes: as in attention.py; R and C are blocks of queries and of keys.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from miles.backends.megatron_utils.parts.packed import PackedSequences

# What torch's flex_attention takes queries and keys by.
BLOCK = 128


def varlen(query_TND, key_TGD, value_TGE, packed: PackedSequences, options, scale, sinks_N) -> torch.Tensor:
    """torch's variable-length flash attention: half precision, whole or windowed, chunks as sequences of their own."""
    from torch.nn.attention.varlen import varlen_attn

    if packed.cp_group is not None:
        key_TGD, value_TGE = (x.index_select(0, packed.run_keys(options.chunk)) for x in (key_TGD, value_TGE))
    size = value_TGE.shape[-1]
    # The kernel knows one head size; MLA's values are narrower than its keys.
    value_TGD = F.pad(value_TGE, (0, query_TND.shape[-1] - size))
    window = -1 if options.window is None else options.window - 1
    bounds = packed.varlen_bounds(options.chunk)
    # Where a run has more keys than queries, the kernel aligns their ends.
    out_TND = varlen_attn(query_TND, key_TGD, value_TGD, *bounds, scale=scale, window_size=(window, 0))
    assert isinstance(out_TND, torch.Tensor), "without what it is asked for it returns nothing else"
    return out_TND[..., :size]


def flex(query_TND, key_TGD, value_TGE, packed: PackedSequences, options, scale, sinks_N) -> torch.Tensor:
    """torch's flex_attention, compiled (Dong et al. 2024): any type, score caps and sinks."""
    if packed.cp_group is not None:
        key_TGD, value_TGE = (x.index_select(0, packed.natural_order()) for x in (key_TGD, value_TGE))
    out, aux = _compiled_flex()(
        *(x.transpose(0, 1)[None] for x in (query_TND, key_TGD, value_TGE)),
        score_mod=None if options.softcap is None else _softcap(options.softcap),
        block_mask=block_mask(packed, options.chunk, options.window),
        scale=scale,
        enable_gqa=query_TND.shape[1] != key_TGD.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out_TNE = out[0].transpose(0, 1)
    if sinks_N is None:
        return out_TNE
    # With a sink s a softmax's sum grows from exp(lse) to exp(lse) + exp(s): the rest shrinks by sigmoid(lse - s).
    share_TN = torch.sigmoid(aux.lse[0].transpose(0, 1) - sinks_N.float())
    return (out_TNE * share_TN[..., None]).to(out_TNE.dtype)


def block_mask(packed: PackedSequences, chunk: int | None, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries sees, made from the ranges of keys alone.

    torch's `create_block_mask` would hold a mask of all queries times all keys.
    """

    def make():
        first_T, last_T = packed.seen_keys(chunk, window)
        num_queries, num_keys = len(first_T), packed.starts[-1]
        # The last block is filled up with the last query.
        queries = torch.arange(-(-num_queries // BLOCK) * BLOCK, device=packed.device).clamp(max=num_queries - 1)
        first_RB, last_RB = (x[queries].view(-1, BLOCK) for x in (first_T, last_T))
        start_C = torch.arange(0, num_keys, BLOCK, device=packed.device)
        end_C = start_C + BLOCK - 1
        seen_RC = (end_C >= first_RB.amin(1, keepdim=True)) & (start_C <= last_RB.amax(1, keepdim=True))
        full_RC = (start_C >= first_RB.amax(1, keepdim=True)) & (end_C <= last_RB.amin(1, keepdim=True))

        def sees(batch, head, query, key):
            return (key >= first_T[query]) & (key <= last_T[query])

        return BlockMask.from_kv_blocks(
            *_counts_and_indices(seen_RC & ~full_RC),
            *_counts_and_indices(full_RC),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(num_queries, num_keys),
        )

    return packed.once(("block mask", chunk, window), make)


def _counts_and_indices(blocks_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, and which, first in each row: [1, 1, R] and [1, 1, R, C]."""
    indices_RC = blocks_RC.int().argsort(dim=1, descending=True, stable=True)
    return blocks_RC.sum(1, dtype=torch.int32)[None, None], indices_RC.int()[None, None]


@functools.cache
def _compiled_flex() -> Callable:
    # One compilation for all lengths. A whole graph, or an error: not in silence the function that holds all scores.
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)

    def run(*args, **kwargs):
        # Numbers are constants of the graph: as its inputs, a score function with gradients cannot be traced. And there
        # is one compilation per type, head size, cap, scale, with and without gradients: more than torch's limit of 8.
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=64):
            return compiled(*args, **kwargs)

    return run


@functools.cache
def _softcap(cap: float) -> Callable:
    def score_mod(score, batch, head, query, key):
        return cap * torch.tanh(score / cap)

    return score_mod
