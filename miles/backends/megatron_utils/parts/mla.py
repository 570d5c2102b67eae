"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over packed sequences.

Shapes: T tokens of the micro-batch (T/tp under sequence parallelism), H hidden size, N this rank's heads, C latent of
keys and values, P and R the parts of a query or key head without and with positions, E value head size.

Megatron's own module, built from local layers, does not sum the gradient of the rotated key, which all heads share,
over tensor-parallel ranks. Here the projections into the latents are whole on every rank and work on its part of the
sequence, so that their gradients are summed like those of norms. It takes tensor parallelism with sequence parallelism
only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.marks import mark
from miles.backends.megatron_utils.parts.norms import RMSNorm
from miles.backends.megatron_utils.parts.packed import PackedSequences
from miles.backends.megatron_utils.parts.rope import rotate
from miles.backends.megatron_utils.parts.specs import core_attention


class Duplicated(torch.nn.Module):
    """A projection without bias that every tensor-parallel rank holds whole and applies to its part of the sequence."""

    def __init__(self, config: MLATransformerConfig, input_size: int, output_size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class LatentNorm(RMSNorm):
    """The norm of a latent: transformers gives it an epsilon of 1e-6, whatever the model's `rms_norm_eps`."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int):
        super().__init__(config, hidden_size, eps=1e-6)


@dataclass
class MLASubmodules:
    """What latent attention is built from; `column` projects latents to heads, `row` heads to the output."""

    core_attention: ModuleSpec
    column: Callable = ColumnParallelLinear
    row: Callable = RowParallelLinear


class LatentAttention(MegatronModule):
    """Attention whose queries, keys and values come from latents; its weights are named as Megatron's are.

    The model's rope "default" turns the last R of each query head and one key that all heads share. The scores are
    scaled by the configuration's `softmax_scale`. Without `q_lora_rank` queries come from the hidden states.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        assert self.tp_group.size() == 1 or config.sequence_parallel
        heads = config.num_attention_heads
        self.key_size = config.qk_head_dim + config.qk_pos_emb_head_dim
        column = partial(
            submodules.column,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        if config.q_lora_rank is None:
            self.linear_q_proj = column(config.hidden_size, heads * self.key_size)
        else:
            self.linear_q_down_proj = Duplicated(config, config.hidden_size, config.q_lora_rank)
            self.q_layernorm = LatentNorm(config, config.q_lora_rank)
            self.linear_q_up_proj = column(config.q_lora_rank, heads * self.key_size)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Duplicated(config, config.hidden_size, latent)
        self.kv_layernorm = LatentNorm(config, config.kv_lora_rank)
        self.linear_kv_up_proj = column(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))
        self.core_attention = submodules.core_attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = submodules.row(
            heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )
        modules = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.recompute_core, self.recompute_up = "core_attn" in modules, "mla_up_proj" in modules

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [T, 1, H] (this rank's part under sequence parallelism) -> the same shape, and no bias."""
        latents = self.latents(hidden_states)
        heads = partial(self.heads, packed=packed_seq_params)
        again = None
        if self.recompute_up and self.training:
            # Not False, which stands for a recipe here.
            again = CheckpointWithoutOutput(fp8=None)
            query, key, value = again.checkpoint(heads, *latents)
        else:
            query, key, value = heads(*latents)
        core = partial(self.core_attention, attention_mask=None, packed_seq_params=packed_seq_params)
        if self.recompute_core and self.training:
            output = checkpoint(core, False, query, key, value)
        else:
            output = core(query, key, value)
        if again is not None:
            again.discard_output_and_register_recompute(output)
        return self.linear_proj(output)

    def latents(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What queries come from [T/tp, 1, *], the latent of keys and values [T/tp, 1, C], the shared key [T, 1, R]."""
        config = self.config
        query_latent = hidden_states
        if config.q_lora_rank is not None:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        latent, shared_key = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        if self.tp_group.size() > 1:
            # Each rank's heads use it: going back, the gather sums what they give.
            shared_key = gather_from_sequence_parallel_region(shared_key, group=self.tp_group)
        return query_latent, self.kv_layernorm(latent), shared_key

    def heads(
        self, query_latent: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor, packed: PackedSequences
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [T, 1, N, P + R], rotated, and values [T, 1, N, E], of `latents`."""
        config, angles = self.config, packed.angles["default"]
        up = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query_TNP, query_TNR = self.queries(up(query_latent)[0]).split(
            [config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1
        )
        rows_T = self.linear_kv_up_proj(latent)[0].squeeze(1)
        key_TNP, value_TNE = rows_T.unflatten(-1, (-1, config.qk_head_dim + config.v_head_dim)).split(
            [config.qk_head_dim, config.v_head_dim], dim=-1
        )
        key_TNR = rotate(shared_key, *angles).expand(-1, key_TNP.shape[1], -1)
        query = torch.cat((query_TNP, rotate(query_TNR, *angles)), dim=-1)
        key = torch.cat((key_TNP, key_TNR), dim=-1)
        return query[:, None], key[:, None], value_TNE.contiguous()[:, None]

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, 1, N * (P + R)] -> [T, N, P + R]."""
        return rows.squeeze(1).unflatten(-1, (-1, self.key_size))


def mla_spec() -> ModuleSpec:
    """Latent attention through our attention over packed sequences."""
    return ModuleSpec(
        module=LatentAttention, submodules=MLASubmodules(core_attention=core_attention(AttentionOptions(rope=None)))
    )
