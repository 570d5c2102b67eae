"""Specifications of one decoder layer, from Megatron's local modules and our parts.

`dense_layer` and `moe_layer` make what most families need; `attention_spec`, `dense_mlp`, `moe_mlp` and `layer_of` are
their pieces, for a family that replaces one of them.
"""

from collections.abc import Callable
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from miles.backends.megatron_utils.parts.attention import AttentionOptions, PackedAttention
from miles.backends.megatron_utils.parts.expert_layer import ExpertLayer
from miles.backends.megatron_utils.parts.experts import GroupedExperts
from miles.backends.megatron_utils.parts.norms import RMSNorm

# The names that Transformer Engine's fused layers have in a Megatron checkpoint, so that both read the same files.
_FUSED_NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def core_attention(options: AttentionOptions) -> ModuleSpec:
    """Our attention over packed sequences with a layer's own options."""
    return ModuleSpec(module=PackedAttention, params={"options": options})


def attention_spec(
    config: TransformerConfig,
    options: AttentionOptions,
    *,
    q_norm: Callable | None = None,
    k_norm: Callable | None = None,
    row: type = RowParallelLinear,
) -> ModuleSpec:
    """Self-attention with a fused query-key-value projection.

    q_norm, k_norm: norms of each query and key head; unset, RMSNorm where the model has `qk_layernorm`, else none.
    row: the output projection.
    """
    default = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core_attention(options),
            linear_proj=row,
            q_layernorm=q_norm or default,
            k_layernorm=k_norm or default,
        ),
    )


def dense_mlp(row: type = RowParallelLinear) -> Callable:
    """A gated MLP. row: its second projection."""
    return partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=row))


def moe_mlp(shared_experts: type = SharedExpertMLP, router: Callable = TopKRouter) -> Callable:
    """Experts, and shared ones where the model has `moe_shared_expert_intermediate_size`.

    shared_experts: the class of the shared ones. router: sends tokens to experts.
    """
    shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(
        ExpertLayer,
        submodules=MoESubmodules(
            experts=GroupedExperts,
            shared_experts=partial(shared_experts, submodules=shared),
            router=router,
        ),
    )


def layer_of(attention: ModuleSpec, mlp: Callable, norm: Callable = RMSNorm, names: dict[str, str] | None = None):
    """A decoder layer of an attention and an MLP (dense or of experts), with a norm before each.

    names: prefixes to replace in Megatron checkpoints.
    """
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names or {},
        ),
    )


def dense_layer(
    config: TransformerConfig,
    options: AttentionOptions | None = None,
    *,
    attention: ModuleSpec | None = None,
    norm: Callable = RMSNorm,
    q_norm: Callable | None = None,
    k_norm: Callable | None = None,
    row: type = RowParallelLinear,
) -> ModuleSpec:
    """A decoder layer with a gated MLP.

    Args:
        options: of the attention (unset: the default ones). attention: replaces it altogether, options and norms too.
        norm: before attention and MLP. q_norm, k_norm: see `attention_spec`.
        row: the projections that end attention and MLP (sandwich norms are part of them).
    """
    attention = attention or attention_spec(
        config, options or AttentionOptions(), q_norm=q_norm, k_norm=k_norm, row=row
    )
    return layer_of(attention, dense_mlp(row), norm, _FUSED_NORM_NAMES)


def moe_layer(
    config: TransformerConfig,
    options: AttentionOptions | None = None,
    *,
    attention: ModuleSpec | None = None,
    norm: Callable = RMSNorm,
    q_norm: Callable | None = None,
    k_norm: Callable | None = None,
    row: type = RowParallelLinear,
    mlp: Callable | None = None,
) -> ModuleSpec:
    """A decoder layer with experts; as `dense_layer`, but `row` is attention's only. mlp: unset, `moe_mlp()`."""
    attention = attention or attention_spec(
        config, options or AttentionOptions(), q_norm=q_norm, k_norm=k_norm, row=row
    )
    return layer_of(attention, mlp or moe_mlp(), norm)
