"""DeepSeek-V3 and R1: latent attention, experts scored by sigmoids with a selection bias, a shared expert."""

import math
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.experts import (
    expert_entries,
    gated_entries,
    sigmoid_router,
    sigmoid_router_problems,
)
from miles.backends.megatron_utils.parts.mla import mla_spec
from miles.backends.megatron_utils.parts.rope import Rope, rope_of
from miles.backends.megatron_utils.parts.specs import dense_layer, moe_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Column, Replicated, Row


class DeepseekV3(Family):
    """Queries, keys and values come from latents; the first layers are dense, the others have experts."""

    architectures = ("DeepseekV3ForCausalLM",)
    config_class = MLATransformerConfig

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config) + sigmoid_router_problems(hf_config)
        heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
        if heads != groups:
            found.append(
                f"num_key_value_heads={groups} (taken: num_attention_heads={heads}, as latents have no groups)"
            )
        if hf_config.n_shared_experts < 1:
            found.append(f"n_shared_experts={hf_config.n_shared_experts} (taken: 1 or more)")
        part = hf_config.rope_parameters.get("partial_rotary_factor", 1.0)
        if part != 1.0:
            found.append(f"rope_parameters.partial_rotary_factor={part} (taken: 1.0)")
        return found

    def allowed_values(self) -> dict[str, tuple]:
        return {
            **super().allowed_values(),
            # Not fields of transformers, which takes them to be this; checkpoints list them.
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
        }

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        key_size = hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim
        return {
            **super().transformer_config(hf_config),
            **sigmoid_router(hf_config),
            "num_moe_experts": hf_config.n_routed_experts,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": hf_config.n_shared_experts * hf_config.moe_intermediate_size,
            "q_lora_rank": hf_config.q_lora_rank,
            "kv_lora_rank": hf_config.kv_lora_rank,
            "qk_head_dim": hf_config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
            "v_head_dim": hf_config.v_head_dim,
            "kv_channels": key_size,
            "softmax_scale": key_size**-0.5 * yarn_mscale(hf_config.rope_parameters) ** 2,
        }

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        return {"default": rope_of(hf_config, interleaved=hf_config.rope_interleave, dim=hf_config.qk_rope_head_dim)}

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: MLATransformerConfig, layer: int) -> ModuleSpec:
        build = moe_layer if self.has_experts(hf_config, layer) else dense_layer
        return build(megatron_config, attention=self.attention_spec())

    def attention_spec(self) -> ModuleSpec:
        """The attention of every layer."""
        return mla_spec()

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        attention = self.attention_entries(hf_config, hf, megatron)
        if not self.has_experts(hf_config, layer):
            return attention + self.mlp_entries(hf_config, hf, megatron)
        hidden, experts, ffn = hf_config.hidden_size, hf_config.n_routed_experts, hf_config.moe_intermediate_size
        router, gate = megatron + "mlp.router.", hf + "mlp.gate."
        shared = hf_config.n_shared_experts * ffn
        return [
            *attention,
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(Replicated(), router + "weight", (gate + "weight",), ((experts, hidden),)),
            norm_entry(router + "expert_bias", gate + "e_score_correction_bias", experts),
            *gated_entries(hf + "mlp.shared_experts.", megatron + "mlp.shared_experts.", hidden, shared),
            *expert_entries(hf + "mlp.experts.", megatron + "mlp.experts.", experts, hidden, ffn, ep_size),
        ]

    def attention_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        hidden, heads, rank = hf_config.hidden_size, hf_config.num_attention_heads, hf_config.kv_lora_rank
        nope, rope, value = hf_config.qk_nope_head_dim, hf_config.qk_rope_head_dim, hf_config.v_head_dim
        attn, attention = hf + "self_attn.", megatron + "self_attention."
        # SGLang multiplies by both in one product, and drops one that comes without the other.
        together = attn + "a_proj" if hf_config.q_lora_rank is not None else None

        def whole(megatron_name: str, hf_name: str, rows: int) -> Entry:
            names = (attn + hf_name + ".weight",)
            return Entry(Replicated(), f"{attention}{megatron_name}.weight", names, ((rows, hidden),), atomic=together)

        def by_head(megatron_name: str, hf_name: str, rows: int, columns: int) -> Entry:
            names = (attn + hf_name + ".weight",)
            return Entry(Column(), f"{attention}{megatron_name}.weight", names, ((heads * rows, columns),))

        found = [norm_entry(megatron + "input_layernorm.weight", hf + "input_layernorm.weight", hidden)]
        if hf_config.q_lora_rank is None:
            found.append(by_head("linear_q_proj", "q_proj", nope + rope, hidden))
        else:
            found += [
                whole("linear_q_down_proj", "q_a_proj", hf_config.q_lora_rank),
                norm_entry(attention + "q_layernorm.weight", attn + "q_a_layernorm.weight", hf_config.q_lora_rank),
                by_head("linear_q_up_proj", "q_b_proj", nope + rope, hf_config.q_lora_rank),
            ]
        return [
            *found,
            whole("linear_kv_down_proj", "kv_a_proj_with_mqa", rank + rope),
            norm_entry(attention + "kv_layernorm.weight", attn + "kv_a_layernorm.weight", rank),
            by_head("linear_kv_up_proj", "kv_b_proj", nope + value, rank),
            Entry(Row(), attention + "linear_proj.weight", (attn + "o_proj.weight",), ((hidden, heads * value),)),
        ]


def yarn_mscale(rope_parameters: dict[str, Any]) -> float:
    """What DeepSeek multiplies queries and keys by where a rope is stretched (transformers' `yarn_get_mscale`)."""
    if rope_parameters["rope_type"] == "default" or rope_parameters["factor"] <= 1:
        return 1.0
    return 0.1 * (rope_parameters.get("mscale_all_dim") or 0.0) * math.log(rope_parameters["factor"]) + 1.0


def mlp_layer_type_problems(hf_config: PreTrainedConfig) -> list[str]:
    """Kinds of MLPs other than dense and of experts, and a number of leading dense layers that says otherwise."""
    types = hf_config.mlp_layer_types
    other = sorted(set(types) - {"dense", "sparse"})
    found = [f"mlp_layer_types={other} (taken: 'dense', 'sparse')"] if other else []
    first = hf_config.to_dict().get("first_k_dense_replace")
    leading = next((number for number, kind in enumerate(types) if kind != "dense"), len(types))
    if first is not None and min(first, len(types)) != leading:
        found.append(f"first_k_dense_replace={first} with {leading} leading dense layers in mlp_layer_types")
    return found
