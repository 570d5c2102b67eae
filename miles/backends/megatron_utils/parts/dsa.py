"""DeepSeek's sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2): to the tokens that an indexer picks.

Shapes: as in mla.py, and K keys in natural order (of all context-parallel ranks), Q queries of a block, J picked keys
of a query, I heads of the indexer, D their size, L = C + R the size of a latent with its rotated key.

Megatron's own path holds the indexer's scores of all heads for all pairs of tokens. Here blocks of queries are computed
one after another, and keys and values stay latents, which all heads share: memory grows with T * J.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.distributed import ProcessGroup

from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.context_parallel import gather_tokens
from miles.backends.megatron_utils.parts.mla import Duplicated, LatentAttention, MLASubmodules
from miles.backends.megatron_utils.parts.packed import PackedSequences
from miles.backends.megatron_utils.parts.rope import rotate
from miles.backends.megatron_utils.parts.specs import core_attention

# Elements of the largest temporary of a block.
BLOCK_ELEMENTS = 2**26


class Indexer(torch.nn.Module):
    """Picks the keys that each query attends to (eq. 1 and 2). It is not trained: what it picks has no gradient.

    Queries and keys are turned by the model's rope "indexer".
    """

    def __init__(self, config: MLATransformerConfig, tp_group: ProcessGroup):
        super().__init__()
        self.heads, self.topk, self.tp_group = config.dsa_indexer_n_heads, config.dsa_indexer_topk, tp_group
        size = config.dsa_indexer_head_dim
        self.linear_wq_b = Duplicated(config, config.q_lora_rank, self.heads * size)
        self.linear_wk = Duplicated(config, config.hidden_size, size)
        self.k_norm = torch.nn.LayerNorm(size, eps=1e-6, dtype=config.params_dtype)
        self.linear_weights_proj = Duplicated(config, config.hidden_size, self.heads)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor, query_latent: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """int32 [T, J]: the picked keys of each query, -1 where it sees fewer.

        hidden_states [T/tp, 1, H], query_latent [T/tp, 1, *]: each tensor-parallel rank picks for its own queries.
        """
        cos_T1R, sin_T1R, interleaved = packed.angles["indexer"]
        key_TD = self.k_norm(self.linear_wk(hidden_states))
        if self.tp_group.size() > 1:
            key_TD = gather_from_sequence_parallel_region(key_TD, group=self.tp_group)
        key_KD = in_natural_order(rotate(key_TD, cos_T1R, sin_T1R, interleaved).squeeze(1), packed)
        start, count = self.tp_group.rank() * len(hidden_states), len(hidden_states)
        own = slice(start, start + count)
        query_TID = self.linear_wq_b(query_latent).squeeze(1).unflatten(-1, (self.heads, -1))
        query_TID = rotate(query_TID, cos_T1R[own], sin_T1R[own], interleaved)
        weight_TI = self.linear_weights_proj(hidden_states).squeeze(1).float() * query_TID[0].numel() ** -0.5
        picked_TJ = torch.full((count, self.topk), -1, dtype=torch.int32, device=hidden_states.device)
        first_T, last_T = (x[own] for x in packed.seen_keys(None, None))
        for block, low, high in key_spans(packed, start, count, BLOCK_ELEMENTS // (self.heads * packed.max_seqlen_q)):
            scores_QIK = product(query_TID[block].flatten(0, 1)[None], key_KD[low:high].T[None])
            scores_QIK = scores_QIK.relu_().view(-1, self.heads, high - low)
            scores_QK = torch.bmm(weight_TI[block, None], scores_QIK).squeeze(1)
            places_K = torch.arange(low, high, device=scores_QK.device)
            hidden_QK = (places_K < first_T[block, None]) | (places_K > last_T[block, None])
            best_QJ, index_QJ = scores_QK.masked_fill_(hidden_QK, -torch.inf).topk(min(self.topk, high - low), dim=-1)
            picked_TJ[block, : high - low] = (index_QJ + low).int().masked_fill_(best_QJ == -torch.inf, -1)
        if self.tp_group.size() > 1:
            picked_TJ = gather_from_sequence_parallel_region(picked_TJ, group=self.tp_group)
        return picked_TJ


class UpProjection(ColumnParallelLinear):
    """Local with Transformer Engine too, which accumulates gradients in calls; one weight is also used without."""


class SparseLatentAttention(LatentAttention):
    """Latent attention in which a query attends to at most `dsa_indexer_topk` of the tokens before it.

    Where no sequence is longer it is latent attention, and the indexer is not asked.
    """

    def __init__(self, config: MLATransformerConfig, submodules: MLASubmodules, layer_number: int, **kwargs):
        super().__init__(config, submodules, layer_number, **kwargs)
        self.indexer = Indexer(config, self.tp_group)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [T, 1, H] (this rank's part under sequence parallelism) -> the same shape, and no bias."""
        if packed_seq_params.max_seqlen_q <= self.indexer.topk:
            return super().forward(hidden_states, packed_seq_params=packed_seq_params)
        latents = self.latents(hidden_states)
        core = partial(self.sparse, packed=packed_seq_params)
        if self.recompute_core and self.training:
            output = checkpoint(core, False, hidden_states, *latents)
        else:
            output = core(hidden_states, *latents)
        return self.linear_proj(output)

    def sparse(
        self,
        hidden_states: torch.Tensor,
        query_latent: torch.Tensor,
        latent: torch.Tensor,
        shared_key: torch.Tensor,
        packed: PackedSequences,
    ) -> torch.Tensor:
        """What the picked keys give, [T, 1, N * E], of `latents`."""
        config, angles = self.config, packed.angles["default"]
        picked_TJ = self.indexer(hidden_states, query_latent, packed)
        if self.tp_group.size() > 1:
            latent = gather_from_sequence_parallel_region(latent, group=self.tp_group)
        key_TL = torch.cat((latent, rotate(shared_key, *angles)), dim=-1).squeeze(1)
        key_KL = in_natural_order(key_TL, packed)
        # Megatron's overlapped gather of parameters waits in the hooks of a call, which does not happen here.
        for hook in self.linear_kv_up_proj._forward_pre_hooks.values():
            hook(self.linear_kv_up_proj, ())
        up_N = self.linear_kv_up_proj.weight.unflatten(0, (-1, config.qk_head_dim + config.v_head_dim))
        key_up_NPC, value_up_NEC = up_N.split([config.qk_head_dim, config.v_head_dim], dim=1)
        query_TNP, query_TNR = self.queries(self.linear_q_up_proj(query_latent)[0]).split(
            [config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1
        )
        # q . (W c) = (W' q) . c: the heads' keys are never made.
        query_TNC = torch.einsum("tnp,npc->tnc", query_TNP, key_up_NPC)
        query_TNL = torch.cat((query_TNC, rotate(query_TNR, *angles)), dim=-1)
        out_TNC = _SparseAttention.apply(query_TNL, key_KL, picked_TJ, config.kv_lora_rank, config.softmax_scale)
        return torch.einsum("tnc,nec->tne", out_TNC, value_up_NEC).flatten(1)[:, None]


class _SparseAttention(torch.autograd.Function):
    """Softmax attention [T, N, C] of queries [T, N, L] to their picked keys, whose first C elements are the values."""

    @staticmethod
    def forward(ctx, query_TNL, key_KL, picked_TJ, value_size, scale):
        ctx.save_for_backward(query_TNL, key_KL, picked_TJ)
        ctx.value_size, ctx.scale = value_size, scale
        out_TNC = query_TNL.new_empty(*query_TNL.shape[:2], value_size)
        for block in _blocks(key_KL, picked_TJ):
            key_QJL, weight_QNJ = _attention_weights(query_TNL[block], key_KL, picked_TJ[block], scale)
            out_TNC[block] = product(weight_QNJ.to(key_KL.dtype), key_QJL[..., :value_size])
        return out_TNC

    @staticmethod
    def backward(ctx, grad_TNC):
        query_TNL, key_KL, picked_TJ = ctx.saved_tensors
        grad_query_TNL, grad_key_KL = torch.empty_like(query_TNL), torch.zeros_like(key_KL, dtype=torch.float32)
        for block in _blocks(key_KL, picked_TJ):
            query_QNL, grad_QNC = query_TNL[block], grad_TNC[block]
            key_QJL, weight_QNJ = _attention_weights(query_QNL, key_KL, picked_TJ[block], ctx.scale)
            grad_weight_QNJ = product(grad_QNC, key_QJL[..., : ctx.value_size].mT)
            # The derivative of a softmax.
            grad_score_QNJ = weight_QNJ * (grad_weight_QNJ - (grad_weight_QNJ * weight_QNJ).sum(-1, keepdim=True))
            grad_score_QNJ = (grad_score_QNJ * ctx.scale).to(key_KL.dtype)
            grad_query_TNL[block] = product(grad_score_QNJ, key_QJL)
            grad_key_QJL = product(grad_score_QNJ.mT, query_QNL)
            grad_key_QJL[..., : ctx.value_size] += product(weight_QNJ.to(key_KL.dtype).mT, grad_QNC)
            # Where nothing was picked all of it is zero.
            grad_key_KL.index_add_(0, picked_TJ[block].flatten().clamp(min=0), grad_key_QJL.flatten(0, 1))
        return grad_query_TNL, grad_key_KL.to(key_KL.dtype), None, None, None


def _attention_weights(query_QNL, key_KL, picked_QJ, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """The picked keys of a block of queries [Q, J, L], and the weight of each, float32 [Q, N, J]."""
    key_QJL = key_KL[picked_QJ.clamp(min=0)]
    scores_QNJ = product(query_QNL, key_QJL.mT) * scale
    return key_QJL, scores_QNJ.masked_fill_(picked_QJ[:, None] < 0, -torch.inf).softmax(dim=-1)


def _blocks(key_KL: torch.Tensor, picked_TJ: torch.Tensor) -> Iterator[slice]:
    queries = max(1, BLOCK_ELEMENTS // (picked_TJ.shape[1] * key_KL.shape[1]))
    return (slice(first, first + queries) for first in range(0, len(picked_TJ), queries))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A batched matrix product in float32; on a GPU half-precision factors are not converted for it."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def in_natural_order(x_T: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
    """The tokens of all context-parallel ranks as they follow each other; gradients are summed."""
    order = packed.natural_order()
    return x_T if order is None else gather_tokens(x_T, packed.cp_group).index_select(0, order)


def key_spans(packed: PackedSequences, start: int, count: int, queries: int) -> Iterator[tuple[slice, int, int]]:
    """Blocks of at most `queries` of the `count` queries from `start`, and the keys that they see together: low, high.

    The slices count from `start`.
    """
    runs = packed.runs(None)
    low_T = np.repeat(runs.key_starts, runs.query_lengths)
    # The last query of a run sees up to its last key.
    ends = runs.key_starts + runs.key_lengths - runs.query_starts - runs.query_lengths
    high_T = np.repeat(ends, runs.query_lengths) + np.arange(1, len(low_T) + 1)
    queries = max(1, queries)
    for first in range(0, count, queries):
        block = slice(first, min(first + queries, count))
        seen = slice(start + block.start, start + block.stop)
        yield block, int(low_T[seen].min()), int(high_T[seen].max())


def dsa_spec() -> ModuleSpec:
    """Sparse latent attention; what is not sparse goes through our attention over packed sequences."""
    return ModuleSpec(
        module=SparseLatentAttention,
        submodules=MLASubmodules(core_attention=core_attention(AttentionOptions(rope=None)), column=UpProjection),
    )
