"""DeepSeek-V4's attention over packed sequences: a window of tokens, compressed entries of those before, and a sink.

Shapes: T tokens of this rank (T/tp under sequence parallelism), H hidden size, L latent of queries, K tokens of all
context-parallel ranks in natural order, W compressed entries, M tokens of an entry, N this rank's heads, D their size,
R its rotated end, I heads of the indexer, E their size, J picked entries of a query, G groups of heads, P output of a
group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch.distributed import ProcessGroup

from miles.backends.megatron_utils.parts.compressed_config import CompressedConfig, Compression
from miles.backends.megatron_utils.parts.dsa import BLOCK_ELEMENTS, in_natural_order, product
from miles.backends.megatron_utils.parts.mla import Duplicated
from miles.backends.megatron_utils.parts.norms import RMSNorm
from miles.backends.megatron_utils.parts.packed import PackedSequences
from miles.backends.megatron_utils.parts.rope import rotate
from miles.backends.megatron_utils.parts.shared_key_attention import Visible, shared_key_attention
from miles.backends.megatron_utils.parts.windows import Windows, token_spans, windows_of


class Compressor(torch.nn.Module):
    """Entries: means of their tokens' rows, weighted by a softmax of gates element by element; then normed, rotated."""

    def __init__(self, config: CompressedConfig, compression: Compression, size: int, tp_group: ProcessGroup):
        super().__init__()
        self.compression, self.tp_group = compression, tp_group
        rows = 2 * size if compression.overlap else size
        self.linear_kv = Duplicated(config, config.hidden_size, rows)
        self.linear_gate = Duplicated(config, config.hidden_size, rows)
        position_bias: Any = torch.nn.Parameter(torch.empty(compression.ratio, rows, dtype=torch.float32))
        # Each tensor-parallel rank pools all entries, but has the gradients of its own heads: they are summed.
        position_bias.sequence_parallel = config.sequence_parallel
        self.position_bias = position_bias
        self.norm = RMSNorm(config, size, eps=config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """[T/tp, 1, H] -> [W, D], the same on all tensor-parallel ranks."""
        both = torch.cat((self.linear_kv(hidden_states), self.linear_gate(hidden_states)), dim=-1)
        if self.tp_group.size() > 1:
            both = gather_from_sequence_parallel_region(both, group=self.tp_group)
        rows_KC, gates_KC = in_natural_order(both.squeeze(1), packed).chunk(2, dim=-1)
        windows = windows_of(packed, self.compression.ratio)
        pooled_WD = self.norm(pool(rows_KC, gates_KC, self.position_bias, windows, self.compression.overlap))
        rope = packed.ropes["compress"]
        angles = packed.once(
            ("entry angles", self.compression.ratio), lambda: (*rope.angles(windows.position_W), rope.interleaved)
        )
        return rotate_end(pooled_WD[:, None], *angles).squeeze(1)


def pool(
    rows_KC: torch.Tensor, gates_KC: torch.Tensor, bias_MC: torch.Tensor, windows: Windows, overlap: bool
) -> torch.Tensor:
    """[W, D]: of each entry the weighted mean of its tokens' rows, by a softmax in float32.

    With overlap C is 2 D: an entry has its own tokens' second halves, and the first halves of those before, unless the
    entry before it is of another sequence.
    """
    rows_WMC, gates_WMC = rows_KC[windows.tokens_WM].float(), gates_KC[windows.tokens_WM].float() + bias_MC
    if overlap:
        alone_W11 = ~windows.follows_W[:, None, None]
        (before, rows), (gates_before, gates) = (x.chunk(2, dim=-1) for x in (rows_WMC, gates_WMC))
        before = torch.cat((before[:1], before[:-1])).masked_fill(alone_W11, 0.0)
        gates_before = torch.cat((gates_before[:1], gates_before[:-1])).masked_fill(alone_W11, -torch.inf)
        rows_WMC, gates_WMC = torch.cat((before, rows), dim=1), torch.cat((gates_before, gates), dim=1)
    return (rows_WMC * gates_WMC.softmax(dim=1)).sum(dim=1).to(rows_KC.dtype)


class Indexer(torch.nn.Module):
    """Picks the entries that each query attends to. It is not trained: what it picks has no gradient."""

    def __init__(self, config: CompressedConfig, compression: Compression, topk: int, tp_group: ProcessGroup):
        super().__init__()
        self.ratio, self.topk, self.heads, self.tp_group = compression.ratio, topk, config.index_heads, tp_group
        self.linear_wq_b = Duplicated(config, config.q_lora_rank, self.heads * config.index_size)
        self.linear_weights_proj = Duplicated(config, config.hidden_size, self.heads)
        self.compressor = Compressor(config, compression, config.index_size, tp_group)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, hidden_states: torch.Tensor, query_latent: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor | None:
        """int32 [T, J], -1 where a query sees fewer; None where every query sees no more entries than are picked.

        hidden_states [T/tp, 1, H], query_latent [T/tp, 1, L]: each tensor-parallel rank picks for its own queries.
        """
        seen, topk = windows_of(packed, self.ratio).seen, self.topk
        if seen.longest <= topk:
            return None
        key_WE = self.compressor(hidden_states, packed)
        start, count = self.tp_group.rank() * len(hidden_states), len(hidden_states)
        mine = slice(start, start + count)
        seen, (cos_T1R, sin_T1R, interleaved) = seen.part(mine), packed.angles["compress"]
        query_TIE = self.linear_wq_b(query_latent).squeeze(1).unflatten(-1, (self.heads, -1))
        query_TIE = rotate_end(query_TIE, cos_T1R[mine], sin_T1R[mine], interleaved)
        weight_TI = self.linear_weights_proj(hidden_states).squeeze(1).float() * query_TIE[0].numel() ** -0.5
        picked_TJ = torch.full((count, topk), -1, dtype=torch.int32, device=key_WE.device)
        for block, low, high in seen.blocks(max(1, BLOCK_ELEMENTS // (self.heads * len(key_WE)))):
            scores_QIW = product(query_TIE[block].flatten(0, 1)[None], key_WE[low:high].T[None])
            scores_QIW = scores_QIW.relu_().view(-1, self.heads, high - low)
            scores_QW = torch.bmm(weight_TI[block, None], scores_QIW).squeeze(1)
            scores_QW = scores_QW.masked_fill_(~seen.mask(block, low, high), -torch.inf)
            best_QJ, index_QJ = scores_QW.topk(min(topk, high - low), dim=-1)
            picked_TJ[block, : high - low] = (index_QJ + low).int().masked_fill_(best_QJ == -torch.inf, -1)
        if self.tp_group.size() > 1:
            picked_TJ = gather_from_sequence_parallel_region(picked_TJ, group=self.tp_group)
        return picked_TJ


@dataclass
class CompressedSubmodules:
    """What the attention is built from; `column` projects latents to heads, `row` groups to the output."""

    column: Callable = ColumnParallelLinear
    row: Callable = RowParallelLinear


class CompressedAttention(MegatronModule):
    """The model's rope "main" turns layers without compression, "compress" the others.

    A value is a key, and so turned: the output is turned back by the position of its query.
    """

    # Parameters of the module itself that tensor parallelism cuts, along dimension 0.
    CUT = ("softmax_offset", "group_proj")

    def __init__(
        self,
        config: CompressedConfig,
        submodules: CompressedSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        compression: Compression | None = None,
        **_,
    ):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        tp_size = self.tp_group.size()
        assert tp_size == 1 or config.sequence_parallel
        heads, size = config.num_attention_heads, config.kv_channels
        self.rope, self.scale = "main" if compression is None else "compress", size**-0.5
        shared = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.linear_q_down_proj = Duplicated(config, config.hidden_size, config.q_lora_rank)
        self.q_layernorm = RMSNorm(config, config.q_lora_rank, eps=config.layernorm_epsilon)
        self.linear_q_up_proj = submodules.column(
            config.q_lora_rank,
            heads * size,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **shared,
        )
        self.linear_kv_proj = Duplicated(config, config.hidden_size, size)
        self.kv_layernorm = RMSNorm(config, size, eps=config.layernorm_epsilon)
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads // tp_size, dtype=torch.float32))
        self.groups = config.output_groups // tp_size
        rows, columns = self.groups * config.output_rank, heads * size // config.output_groups
        self.group_proj = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
        for name in self.CUT:
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)
        self.linear_proj = submodules.row(
            config.output_groups * config.output_rank,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )
        self.compressor = self.indexer = None
        if compression is not None:
            self.compressor = Compressor(config, compression, size, self.tp_group)
            if compression.topk is not None:
                self.indexer = Indexer(config, compression, compression.topk, self.tp_group)
        modules = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.recompute_core = "core_attn" in modules

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [T, 1, H] (this rank's part under sequence parallelism) -> the same shape, and no bias."""
        packed = packed_seq_params
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        key = self.kv_layernorm(self.linear_kv_proj(hidden_states))
        if self.tp_group.size() > 1:
            # Each rank's heads use it: going back, the gather sums what they give.
            key = gather_from_sequence_parallel_region(key, group=self.tp_group)
        key_KD = in_natural_order(rotate_end(key, *packed.angles[self.rope]).squeeze(1), packed)
        entries = picked_TJ = None
        if self.compressor is not None:
            entries = windows_of(packed, self.compressor.compression.ratio).seen
            key_AD = torch.cat((key_KD, self.compressor(hidden_states, packed)))
            if self.indexer is not None:
                picked_TJ = self.indexer(hidden_states.detach(), latent.detach(), packed)
        else:
            key_AD = key_KD
        visible = Visible(token_spans(packed, self.config.attention_window), len(key_KD), entries, picked_TJ)
        core = partial(self.core, visible=visible, angles=packed.angles[self.rope])
        if self.recompute_core and self.training:
            output = checkpoint(core, False, latent, key_AD)
        else:
            output = core(latent, key_AD)
        return self.linear_proj(output)

    def core(
        self,
        latent: torch.Tensor,
        key_AD: torch.Tensor,
        visible: Visible,
        angles: tuple[torch.Tensor, torch.Tensor, bool],
    ) -> torch.Tensor:
        """[T, 1, G * P]: from the latents of queries to what the groups of heads give."""
        query_TND = self.linear_q_up_proj(latent)[0].squeeze(1).unflatten(-1, (-1, self.config.kv_channels))
        query_TND = F.rms_norm(query_TND, query_TND.shape[-1:], None, self.config.layernorm_epsilon)
        query_TND = rotate_end(query_TND, *angles)
        out_TND = turned_back(
            shared_key_attention(query_TND, key_AD, self.softmax_offset, visible, self.scale), *angles
        )
        out_TGX = out_TND.flatten(1).unflatten(-1, (self.groups, -1))
        out_TGP = torch.einsum("tgx,gpx->tgp", out_TGX, self.group_proj.unflatten(0, (self.groups, -1)))
        return out_TGP.flatten(1)[:, None]

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """As Megatron's, which takes parameters of the module itself for whole on every rank."""
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return found | make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in self.CUT},
            prefix,
            dict.fromkeys(self.CUT, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def rotate_end(x_TND: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the last R of each head."""
    size = cos_T1R.shape[-1]
    return torch.cat((x_TND[..., :-size], rotate(x_TND[..., -size:], cos_T1R, sin_T1R, interleaved)), dim=-1)


def turned_back(out_TND: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Undo `rotate_end`."""
    return rotate_end(out_TND, cos_T1R, -sin_T1R, interleaved)


def compressed_spec(compression: Compression | None) -> ModuleSpec:
    """The attention of a layer with this compression (None: a window of tokens only)."""
    return ModuleSpec(
        module=CompressedAttention, params={"compression": compression}, submodules=CompressedSubmodules()
    )
