"""gpt-oss: attention sinks, a window in every second layer, biases everywhere, a clamped gate in the experts."""

from typing import Any

from megatron.core.activations import quick_gelu
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family, layer_type_problems, layer_window
from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.specs import moe_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.expert_layouts import FusedDown, FusedGateUp
from miles.hf.layouts import Column, Replicated

# Constants of transformers' GptOssExperts (alpha is that of Megatron's quick_gelu).
ALPHA, LIMIT = 1.702, 7.0


class GptOss(Family):
    """Experts compute (min(gate, 7) * sigmoid(1.702 * gate)) * (clamp(up) + 1), on the softmax of the chosen scores."""

    architectures = ("GptOssForCausalLM",)
    qkv_bias = True

    def allowed_values(self) -> dict[str, tuple]:
        return {
            **super().allowed_values(),
            "attention_bias": (True,),
            "swiglu_limit": (LIMIT, None),
        }

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + layer_type_problems(hf_config)

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        return super().transformer_config(hf_config) | dict(
            add_bias_linear=True,
            activation_func=quick_gelu,
            activation_func_clamp_value=LIMIT,
            glu_linear_offset=1.0,
            num_moe_experts=hf_config.num_local_experts,
            moe_ffn_hidden_size=hf_config.intermediate_size,
            moe_router_topk=hf_config.num_experts_per_tok,
        )

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(window=layer_window(hf_config, layer), sinks=True)

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        options = self.attention_options(hf_config, layer)
        return moe_layer(megatron_config, options)

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        hidden, heads = hf_config.hidden_size, hf_config.num_attention_heads
        experts, ffn = hf_config.num_local_experts, hf_config.intermediate_size
        attn, attention, mlp = hf + "self_attn.", megatron + "self_attention.", megatron + "mlp."

        def fused(kind, part: str, name: str, *shape: int) -> Entry:
            megatron_name = mlp + "experts." + part
            return Entry(kind, megatron_name, (hf + "mlp.experts." + name,), ((experts, *shape),), stacked=True)

        return [
            *self.attention_entries(hf_config, hf, megatron),
            norm_entry(attention + "linear_proj.bias", attn + "o_proj.bias", hidden),
            Entry(Column(), attention + "core_attention.softmax_offset", (attn + "sinks",), ((heads,),)),
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(Replicated(), mlp + "router.weight", (hf + "mlp.router.weight",), ((experts, hidden),)),
            norm_entry(mlp + "router.bias", hf + "mlp.router.bias", experts),
            fused(FusedGateUp(interleaved=True), "linear_fc1.weight", "gate_up_proj", hidden, 2 * ffn),
            fused(FusedGateUp(interleaved=True), "linear_fc1.bias", "gate_up_proj_bias", 2 * ffn),
            fused(FusedDown(), "linear_fc2.weight", "down_proj", ffn, hidden),
            fused(Replicated(), "linear_fc2.bias", "down_proj_bias", hidden),
        ]
