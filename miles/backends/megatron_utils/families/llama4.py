"""Llama 4's language model, alone or as a part of the model that sees: chunked attention, layers without positions."""

from dataclasses import replace
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.experts import gated_entries
from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.rope import Rope, rope_of
from miles.backends.megatron_utils.parts.specs import dense_layer, moe_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.expert_layouts import FusedDown, FusedGateUp
from miles.hf.layouts import Replicated


class Llama4(Family):
    """One expert a token, whose input is multiplied by the sigmoid of its score, beside a shared one."""

    # SGLang loads the experts of the second only.
    architectures = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config)
        if hf_config.num_experts_per_tok != 1:
            found.append(f"num_experts_per_tok={hf_config.num_experts_per_tok} (taken: 1)")
        other = sorted(set(hf_config.layer_types) - {"full_attention", "chunked_attention"})
        if other:
            found.append(f"layer_types={other} (taken: 'full_attention', 'chunked_attention')")
        return found

    def ignored_prefixes(self, hf_config: PreTrainedConfig) -> tuple[str, ...]:
        return (*super().ignored_prefixes(hf_config), "vision_model.", "multi_modal_projector.")

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        fields = super().transformer_config(hf_config) | dict(
            ffn_hidden_size=hf_config.intermediate_size_mlp, qk_l2_norm=hf_config.use_qk_norm
        )
        if not self.shape(hf_config).num_experts:
            return fields
        return fields | dict(
            num_moe_experts=hf_config.num_local_experts,
            moe_ffn_hidden_size=hf_config.intermediate_size,
            moe_shared_expert_intermediate_size=hf_config.intermediate_size,
            moe_router_topk=1,
            moe_router_score_function="sigmoid",
            moe_apply_probs_on_input=True,
        )

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        return {"default": rope_of(hf_config, interleaved=True)}

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        rotated = hf_config.no_rope_layers[layer]
        chunked = hf_config.layer_types[layer] == "chunked_attention"
        tuned = hf_config.attn_temperature_tuning and not rotated
        return AttentionOptions(
            rope="default" if rotated else None,
            chunk=hf_config.attention_chunk_size if chunked else None,
            temperature=(hf_config.floor_scale, hf_config.attn_scale, 1.0) if tuned else None,
        )

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        build = moe_layer if self.has_experts(hf_config, layer) else dense_layer
        # Hugging Face norms behind the rotation, which keeps the length.
        norm = L2Norm if hf_config.use_qk_norm and hf_config.no_rope_layers[layer] else IdentityOp
        return build(megatron_config, self.attention_options(hf_config, layer), q_norm=norm, k_norm=norm)

    def entries(
        self, hf_config: PreTrainedConfig, layers: range, first_stage: bool, last_stage: bool, ep_size: int = 1
    ) -> list[Entry]:
        found = super().entries(hf_config, layers, first_stage, last_stage, ep_size)
        if hf_config.architectures[0] == "Llama4ForCausalLM":
            return found
        return [replace(entry, hf_names=tuple("language_model." + name for name in entry.hf_names)) for entry in found]

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        hidden, experts, ffn = hf_config.hidden_size, hf_config.num_local_experts, hf_config.intermediate_size
        forward, mlp = hf + "feed_forward.", megatron + "mlp."
        found = [
            *self.attention_entries(hf_config, hf, megatron),
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
        ]
        if not self.has_experts(hf_config, layer):
            return found + gated_entries(forward, mlp, hidden, hf_config.intermediate_size_mlp)

        def fused(kind, part: str, name: str, *shape: int) -> Entry:
            megatron_name = mlp + "experts." + part
            return Entry(kind, megatron_name, (forward + "experts." + name,), ((experts, *shape),), stacked=True)

        return [
            *found,
            Entry(Replicated(), mlp + "router.weight", (forward + "router.weight",), ((experts, hidden),)),
            *gated_entries(forward + "shared_expert.", mlp + "shared_experts.", hidden, ffn),
            fused(FusedGateUp(interleaved=False), "linear_fc1.weight", "gate_up_proj", hidden, 2 * ffn),
            fused(FusedDown(), "linear_fc2.weight", "down_proj", ffn, hidden),
        ]
