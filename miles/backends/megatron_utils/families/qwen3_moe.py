"""Qwen3-MoE (Qwen3-30B-A3B, 235B-A22B): Qwen3's attention, and experts chosen by a softmax."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.experts import expert_entries
from miles.backends.megatron_utils.parts.specs import dense_layer, moe_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Replicated


class Qwen3Moe(Family):
    """Layers of experts with dense ones in between, where config.json says so."""

    architectures = ("Qwen3MoeForCausalLM",)
    qk_norm = True

    def allowed_values(self) -> dict[str, tuple]:
        # No checkpoint has a window, and it was not tried.
        return {**super().allowed_values(), "use_sliding_window": (False, None)}

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config)
        if hf_config.num_experts_per_tok == 1 and hf_config.norm_topk_prob:
            found.append("norm_topk_prob=True with num_experts_per_tok=1 (taken: False, or more experts a token)")
        return found

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        return super().transformer_config(hf_config) | dict(
            num_moe_experts=hf_config.num_experts,
            moe_ffn_hidden_size=hf_config.moe_intermediate_size,
            moe_router_topk=hf_config.num_experts_per_tok,
            # The softmax of the chosen scores is the softmax of all, divided by the sum of the chosen.
            moe_router_pre_softmax=not hf_config.norm_topk_prob,
        )

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        build = moe_layer if self.has_experts(hf_config, layer) else dense_layer
        return build(megatron_config, self.attention_options(hf_config, layer))

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        if not self.has_experts(hf_config, layer):
            return super().layer_entries(hf_config, layer, hf, megatron, ep_size)
        hidden, experts, ffn = hf_config.hidden_size, hf_config.num_experts, hf_config.moe_intermediate_size
        return [
            *self.attention_entries(hf_config, hf, megatron),
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(Replicated(), megatron + "mlp.router.weight", (hf + "mlp.gate.weight",), ((experts, hidden),)),
            *expert_entries(hf + "mlp.experts.", megatron + "mlp.experts.", experts, hidden, ffn, ep_size),
        ]
