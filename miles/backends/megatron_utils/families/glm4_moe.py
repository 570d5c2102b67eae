"""GLM-4.5, 4.6 and 4.7: experts scored by sigmoids with a selection bias, shared experts, leading dense layers."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.experts import (
    expert_entries,
    gated_entries,
    sigmoid_router,
    sigmoid_router_problems,
)
from miles.backends.megatron_utils.parts.specs import dense_layer, moe_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Replicated

QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")


class Glm4Moe(Family):
    """Half of each head rotated; biases of query, key and value and norms of query and key as config.json says."""

    architectures = ("Glm4MoeForCausalLM",)
    qk_norm = True

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + sigmoid_router_problems(hf_config)

    def allowed_values(self) -> dict[str, tuple]:
        return {**super().allowed_values(), "attention_bias": (False, True)}

    def has_qkv_bias(self, hf_config: PreTrainedConfig) -> bool:
        return hf_config.attention_bias

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        return {
            **super().transformer_config(hf_config),
            **sigmoid_router(hf_config),
            "qk_layernorm": hf_config.use_qk_norm,
            "num_moe_experts": hf_config.n_routed_experts,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": hf_config.n_shared_experts * hf_config.moe_intermediate_size,
        }

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        build = moe_layer if self.has_experts(hf_config, layer) else dense_layer
        return build(megatron_config, self.attention_options(hf_config, layer))

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        attention = self.attention_entries(hf_config, hf, megatron)
        if not self.has_experts(hf_config, layer):
            return attention + self.mlp_entries(hf_config, hf, megatron)
        hidden, experts, ffn = hf_config.hidden_size, hf_config.n_routed_experts, hf_config.moe_intermediate_size
        gate, shared = hf + "mlp.gate.", hf_config.n_shared_experts * ffn
        return [
            *attention,
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(Replicated(), megatron + "mlp.router.weight", (gate + "weight",), ((experts, hidden),)),
            norm_entry(megatron + "mlp.router.expert_bias", gate + "e_score_correction_bias", experts),
            *gated_entries(hf + "mlp.shared_experts.", megatron + "mlp.shared_experts.", hidden, shared),
            *expert_entries(hf + "mlp.experts.", megatron + "mlp.experts.", experts, hidden, ffn, ep_size),
        ]

    def attention_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        entries = super().attention_entries(hf_config, hf, megatron)
        if hf_config.use_qk_norm:
            return entries
        return [entry for entry in entries if not entry.megatron_name.endswith(QK_NORMS)]
