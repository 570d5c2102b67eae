"""Attention within packed sequences, with the options of the model families.

Shapes: T this rank's tokens of all packed sequences, N query heads, G key and value heads, D head size of queries and
keys, E of values, Q and K the queries and keys of a padded row, S rows.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from miles.backends.megatron_utils.parts.context_parallel import gather_tokens
from miles.backends.megatron_utils.parts.kernels import flex, varlen
from miles.backends.megatron_utils.parts.marks import mark
from miles.backends.megatron_utils.parts.packed import PackedSequences, PaddedGroup
from miles.backends.megatron_utils.parts.rope import rotate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer's attention does besides causal softmax attention within each sequence.

    Args:
        rope: which of the model's ropes turns queries and keys; None for a layer without positions.
        window: how many tokens a query sees at most, itself included (Hugging Face's `sliding_window`).
        chunk: sequences are cut into chunks of so many tokens from their own start, and a query sees its own chunk only
            (Llama 4's `attention_chunk_size`).
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2).
        sinks: each head has a learned score that takes part in the softmax and has no value (gpt-oss).
        temperature: (floor, factor, first): queries at position p of their sequence are multiplied by
            1 + factor * log(1 + floor((p + first) / floor)). Llama 4 counts positions from 1, Ministral 3 from 0.
    """

    rope: str | None = "default"
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    temperature: tuple[float, float, float] | None = None


class PackedAttention(MegatronModule):
    """Megatron's core attention over packed sequences, queries and keys rotated here; grouped queries allowed.

    With `options.sinks` it has the parameter `softmax_offset` (Transformer Engine's name): [this rank's heads].
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
        options: AttentionOptions = AttentionOptions(),
    ):
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self" and not config.attention_dropout
        self.scale = softmax_scale
        self.options = options
        self.softmax_offset = None
        if options.sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            mark(self.softmax_offset, tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def forward(
        self, query, key, value, attention_mask, *, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> torch.Tensor:
        """query [T, 1, N, D], key [T, 1, G, D], value [T, 1, G, E] -> [T, 1, N * E]."""
        query_TND, key_TGD, value_TGE = (x.squeeze(1) for x in (query, key, value))
        if self.options.rope is not None:
            angles = packed_seq_params.angles[self.options.rope]
            query_TND, key_TGD = (rotate(x, *angles) for x in (query_TND, key_TGD))
        out_TNE = attend(
            query_TND, key_TGD, value_TGE, packed_seq_params, self.options, self.scale, self.softmax_offset
        )
        return out_TNE.flatten(1).unsqueeze(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None) -> dict:
        """For Megatron's distributed checkpoints: the sinks are split over tensor-parallel ranks."""
        own = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)


def attend(
    query_TND: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGE: torch.Tensor,
    packed: PackedSequences,
    options: AttentionOptions = AttentionOptions(),
    scale: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within each packed sequence, under every option but the rope: [T, N, E].

    Queries and keys come rotated. N is a multiple of G; E may differ from D. Under context parallelism the keys and
    values of all its ranks are gathered here. Memory grows with T, not with its square, on a GPU.

    Args:
        scale: multiplies the scores; 1 / sqrt(D) by default.
        sinks_N: with `options.sinks`, the score of each head's sink.
    """
    assert options.sinks == (sinks_N is not None)
    scale = query_TND.shape[-1] ** -0.5 if scale is None else scale
    if options.window is not None and options.window >= packed.max_seqlen_q:
        options = replace(options, window=None)
    if options.temperature is not None:
        query_TND = (query_TND * _temperature(packed.position_ids_T, *options.temperature)).to(query_TND.dtype)
    if packed.cp_group is not None:
        key_TGD, value_TGE = (gather_tokens(x, packed.cp_group) for x in (key_TGD, value_TGE))
    kernel = kernel_for(query_TND, value_TGE, options)
    _log_once(kernel.__name__, query_TND.device.type, options)
    return kernel(query_TND, key_TGD, value_TGE, packed, options, scale, sinks_N)


def kernel_for(query_TND: torch.Tensor, value_TGE: torch.Tensor, options: AttentionOptions) -> Callable:
    """The function that computes the attention: by device, type, head sizes and options."""
    if not query_TND.is_cuda:
        return padded
    # Flash attention: half precision, heads of at most 256 and of a multiple of 8, values no wider than keys.
    size = query_TND.shape[-1]
    fits = query_TND.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0
    if fits and value_TGE.shape[-1] <= size and options.softcap is None and not options.sinks:
        return varlen
    return flex


@functools.cache
def _log_once(kernel: str, device: str, options: AttentionOptions) -> None:
    logger.info("attention on the %s through %s: %s", device, kernel, options)


def _temperature(position_ids_T: torch.Tensor, floor: float, factor: float, first: float) -> torch.Tensor:
    """Llama 4's scale of queries beyond its training length (`attn_temperature_tuning`), float32 [T, 1, 1]."""
    return (torch.log1p(torch.floor((position_ids_T.float() + first) / floor)) * factor + 1.0)[:, None, None]


def padded(query_TND, key_TGD, value_TGE, packed: PackedSequences, options, scale, sinks_N) -> torch.Tensor:
    """Runs of like length padded to one and computed together: on a CPU, and the reference for the kernels of a GPU."""
    groups, place_T = packed.padded_groups(options.chunk)
    outputs = []
    for group in groups:
        # [T, N, D] -> [S, N, L, D]; padding lies behind each run, where causal attention never looks.
        q_SNQD = query_TND[group.query_index_SQ].transpose(1, 2)
        k_SGKD, v_SGKE = (x[group.key_index_SK].transpose(1, 2) for x in (key_TGD, value_TGE))
        if options.softcap is None and sinks_N is None:
            causal = group.square and options.window is None
            out_SNQE = F.scaled_dot_product_attention(
                q_SNQD,
                k_SGKD,
                v_SGKE,
                attn_mask=None if causal else _seen(group, options.window),
                is_causal=causal,
                scale=scale,
                enable_gqa=q_SNQD.shape[1] != k_SGKD.shape[1],
            )
        else:
            out_SNQE = _plain(q_SNQD, k_SGKD, v_SGKE, _seen(group, options.window), options.softcap, scale, sinks_N)
        outputs.append(out_SNQE.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[place_T]


def _seen(group: PaddedGroup, window: int | None) -> torch.Tensor:
    """bool [S, 1, Q, K]: which keys each query sees."""
    keys_K, last_SQ1 = torch.arange(group.key_index_SK.shape[1]), group.last_key_SQ[..., None]
    seen_SQK = keys_K <= last_SQ1
    if window is not None:
        seen_SQK &= keys_K > last_SQ1 - window
    return seen_SQK[:, None]


def _plain(q_SNQD, k_SGKD, v_SGKE, seen_S1QK, softcap, scale, sinks_N) -> torch.Tensor:
    """Attention written out in float32, for what torch's function does not have."""
    repeat = q_SNQD.shape[1] // k_SGKD.shape[1]
    k_SNKD, v_SNKE = (x.float().repeat_interleave(repeat, dim=1) for x in (k_SGKD, v_SGKE))
    scores_SNQK = (q_SNQD.float() @ k_SNKD.transpose(-1, -2)) * scale
    if softcap is not None:
        scores_SNQK = softcap * torch.tanh(scores_SNQK / softcap)
    scores_SNQK = scores_SNQK.masked_fill(~seen_S1QK, -torch.inf)
    if sinks_N is not None:
        sinks_SNQ1 = sinks_N.float()[:, None, None].expand(*scores_SNQK.shape[:1], -1, scores_SNQK.shape[2], 1)
        scores_SNQK = torch.cat((scores_SNQK, sinks_SNQ1), dim=-1)
    weights_SNQK = scores_SNQK.softmax(dim=-1)[..., : k_SNKD.shape[2]]
    return (weights_SNQK @ v_SNKE).to(q_SNQD.dtype)
