"""MiniMax-M2 and M2.1: experts in every layer, norms over all query heads and over all key heads."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.experts import expert_entries
from miles.backends.megatron_utils.parts.full_norm import FullKNorm, FullQNorm
from miles.backends.megatron_utils.parts.rope import Rope, rope_of
from miles.backends.megatron_utils.parts.specs import moe_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Replicated


class MiniMaxM2(Family):
    """Sigmoid scores with a selection bias; a part of each head is rotated."""

    architectures = ("MiniMaxM2ForCausalLM",)
    qk_norm = True

    def allowed_values(self) -> dict[str, tuple]:
        return {
            **super().allowed_values(),
            # The hub's config.json has these; transformers takes them to be so without reading them.
            "scoring_func": ("sigmoid", None),
            "use_qk_norm": (True, None),
            "qk_norm_type": ("per_layer", None),
            "use_routing_bias": (True, None),
            "shared_intermediate_size": (0, None),
        }

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config)
        if hf_config.num_experts_per_tok == 1:
            found.append("num_experts_per_tok=1 (taken: 2 or more, whose scores are divided by their sum)")
        kinds = sorted(set(hf_config.to_dict().get("attn_type_list") or [1]) - {1})
        if kinds:
            found.append(f"attn_type_list has {kinds} (taken: 1, softmax attention, in every layer)")
        # transformers 5.12 reads the one and not the other, SGLang the other and not the one.
        factor = hf_config.rope_parameters.get("partial_rotary_factor", 1.0)
        said = int(self.head_dim(hf_config) * factor)
        rotated = self.rotated(hf_config)
        if factor != 1.0 and rotated != said:
            found.append(
                f"rope_parameters.partial_rotary_factor={factor} rotates {said} of a head, rotary_dim {rotated}; "
                "set rotary_dim to the right one and the factor accordingly"
            )
        return found

    def rotated(self, hf_config: PreTrainedConfig) -> int:
        """How much of a head turns: the hub's `rotary_dim`, which SGLang reads; without it, all."""
        return hf_config.to_dict().get("rotary_dim") or self.head_dim(hf_config)

    def ignored_prefixes(self, hf_config: PreTrainedConfig) -> tuple[str, ...]:
        first, further = hf_config.num_hidden_layers, hf_config.to_dict().get("num_mtp_modules") or 0
        return tuple(f"model.layers.{layer}." for layer in range(first, first + further))

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        return super().transformer_config(hf_config) | dict(
            num_moe_experts=hf_config.num_local_experts,
            moe_ffn_hidden_size=hf_config.intermediate_size,
            moe_router_topk=hf_config.num_experts_per_tok,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            # `ExpertLoad` moves the bias, in steps that are taken.
            moe_router_bias_update_rate=0.0,
        )

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        return {"default": rope_of(hf_config, dim=self.rotated(hf_config))}

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        options = self.attention_options(hf_config, layer)
        return moe_layer(megatron_config, options, q_norm=FullQNorm, k_norm=FullKNorm)

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        hidden, experts, ffn = hf_config.hidden_size, hf_config.num_local_experts, hf_config.intermediate_size
        block, router = hf + "block_sparse_moe.", megatron + "mlp.router."
        return [
            *self.attention_entries(hf_config, hf, megatron),
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(Replicated(), router + "weight", (block + "gate.weight",), ((experts, hidden),)),
            norm_entry(router + "expert_bias", block + "e_score_correction_bias", experts),
            *expert_entries(
                block + "experts.", megatron + "mlp.experts.", experts, hidden, ffn, ep_size, ("w1", "w3", "w2")
            ),
        ]

    def attention_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        head_dim = self.head_dim(hf_config)
        sizes = {
            "q_layernorm.weight": hf_config.num_attention_heads * head_dim,
            "k_layernorm.weight": hf_config.num_key_value_heads * head_dim,
        }
        return [
            norm_entry(entry.megatron_name, entry.hf_names[0], sizes[part]) if part in sizes else entry
            for entry in super().attention_entries(hf_config, hf, megatron)
            for part in (".".join(entry.megatron_name.split(".")[-2:]),)
        ]
