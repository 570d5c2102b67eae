"""Attention of SGLang's `torch_native` backend for all sequences of one length at once, instead of one by one.

The backend calls PyTorch's attention once a sequence and layer, which is most of a CPU engine's time with small models.
A kernel call treats each sequence of a batch on its own, and nothing is padded: the numbers are those of the loop up to
the order in which sums are taken, which the matrix products choose by processor, threads and number of sequences.
"""

from collections import defaultdict
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import scaled_dot_product_attention

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def decode(
    original, backend, query, output, k_cache, v_cache, table, requests, seq_lens, encoder_lens=None, **how: Any
):
    """Around `_run_sdpa_forward_decode`: one query token a sequence.

    Args:
        query, output: [S, heads, width], of S sequences; the result is written into output.
        k_cache, v_cache: [slots, kv heads, width], of all tokens held.
        table, requests: row requests[s] of table holds sequence s's slots.
        seq_lens: [S], tokens of a sequence, the query's own among them.
    """
    if encoder_lens is not None or how["sliding_window_size"] is not None:
        return original(backend, query, output, k_cache, v_cache, table, requests, seq_lens, encoder_lens, **how)
    for (length,), rows_G in _groups(seq_lens).items():
        slots_GL = table[requests[rows_G], :length]
        attended = _attend(query[rows_G, :, None], k_cache[slots_GL], v_cache[slots_GL], how)
        output[rows_G] = attended[:, :, 0]
    return output


def extend(
    original, backend, query, output, k_cache, v_cache, table, requests, seq_lens, prefix_lens, extend_lens,
    encoder_lens=None, **how: Any,
):  # fmt: skip
    """Around `_run_sdpa_forward_extend`: as `decode`, with extend_lens[s] query tokens that follow prefix_lens[s]."""
    if encoder_lens is not None or how["sliding_window_size"] is not None:
        return original(
            backend, query, output, k_cache, v_cache, table, requests, seq_lens, prefix_lens, extend_lens,
            encoder_lens, **how,
        )  # fmt: skip
    starts = extend_lens.cumsum(0) - extend_lens
    for (length, prefix), rows_G in _groups(seq_lens, prefix_lens).items():
        new = length - prefix
        tokens_GE = starts[rows_G, None] + torch.arange(new)
        slots_GL = table[requests[rows_G], :length]
        # The kernel's causal mask wants as many queries as keys: those of the prefix are of no use.
        query_GHLD = query.new_zeros(len(rows_G), query.shape[1], length, query.shape[2])
        query_GHLD[:, :, prefix:] = query[tokens_GE].transpose(1, 2)
        attended = _attend(query_GHLD, k_cache[slots_GL], v_cache[slots_GL], how)
        output[tokens_GE] = attended[:, :, prefix:].transpose(1, 2)
    return output


def _groups(*lengths_S: torch.Tensor) -> dict[tuple[int, ...], torch.Tensor]:
    """The sequences of each combination of lengths."""
    groups = defaultdict(list)
    for row, key in enumerate(zip(*(lengths.tolist() for lengths in lengths_S), strict=True)):
        groups[key].append(row)
    return {key: torch.tensor(rows) for key, rows in groups.items()}


def _attend(query_GHLD: torch.Tensor, key_GLHD: torch.Tensor, value_GLHD: torch.Tensor, how: dict[str, Any]):
    return scaled_dot_product_attention(
        query_GHLD,
        key_GLHD.to(query_GHLD.dtype).transpose(1, 2),
        value_GLHD.to(query_GHLD.dtype).transpose(1, 2),
        enable_gqa=how["enable_gqa"],
        scale=how["scaling"],
        is_causal=how["causal"],
    )


def register() -> None:
    """Hook it into this process's server, before SGLang loads its plugins."""
    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_decode", decode, HookType.AROUND)
    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_extend", extend, HookType.AROUND)
