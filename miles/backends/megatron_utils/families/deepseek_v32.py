"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an indexer picks."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.deepseek_v3 import DeepseekV3, mlp_layer_type_problems
from miles.backends.megatron_utils.parts.dsa import dsa_spec
from miles.backends.megatron_utils.parts.rope import Rope, rope_of
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Replicated


class DeepseekV32(DeepseekV3):
    """The indexer is loaded and exported, and never trained."""

    architectures = ("DeepseekV32ForCausalLM",)

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config) + mlp_layer_type_problems(hf_config)
        other = sorted(set(hf_config.layer_types) - {"deepseek_sparse_attention"})
        if other:
            found.append(f"layer_types={other} (taken: 'deepseek_sparse_attention')")
        if hf_config.num_experts != hf_config.n_routed_experts:
            found.append(f"num_experts={hf_config.num_experts} (taken: n_routed_experts={hf_config.n_routed_experts})")
        return found

    def allowed_values(self) -> dict[str, tuple]:
        # The last two are not fields of transformers; GLM-5 has them, whose indexer differs.
        return super().allowed_values() | {
            "mlp_bias": (False, None),
            "indexer_rope_interleave": (False, None),
            "rope_interleave": (True, None),
        }

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        return super().transformer_config(hf_config) | dict(
            dsa_indexer_n_heads=hf_config.index_n_heads,
            dsa_indexer_head_dim=hf_config.index_head_dim,
            dsa_indexer_topk=hf_config.index_topk,
        )

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        size = hf_config.qk_rope_head_dim
        return {"default": rope_of(hf_config, interleaved=True, dim=size), "indexer": rope_of(hf_config, dim=size)}

    def attention_spec(self) -> ModuleSpec:
        return dsa_spec()

    def attention_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        hidden, heads, size = hf_config.hidden_size, hf_config.index_n_heads, hf_config.index_head_dim
        indexer, own = hf + "self_attn.indexer.", megatron + "self_attention.indexer."

        def whole(name: str, shape: tuple[int, int], atomic: str | None = None) -> Entry:
            return Entry(
                Replicated(), f"{own}linear_{name}.weight", (f"{indexer}{name}.weight",), (shape,), atomic=atomic
            )

        return [
            *super().attention_entries(hf_config, hf, megatron),
            whole("wq_b", (heads * size, hf_config.q_lora_rank)),
            # SGLang multiplies by both in one product, and drops one that comes without the other.
            whole("wk", (size, hidden), indexer),
            norm_entry(own + "k_norm.weight", indexer + "k_norm.weight", size),
            norm_entry(own + "k_norm.bias", indexer + "k_norm.bias", size),
            whole("weights_proj", (heads, hidden), indexer),
        ]
