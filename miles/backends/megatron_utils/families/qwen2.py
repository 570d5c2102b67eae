"""Qwen2 and Qwen2.5, dense."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family, layer_type_problems, layer_window
from miles.backends.megatron_utils.parts.attention import AttentionOptions


class Qwen2(Family):
    """Llama's layers with a bias on query, key and value."""

    architectures = ("Qwen2ForCausalLM",)
    qkv_bias = True

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + layer_type_problems(hf_config)

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(window=layer_window(hf_config, layer))
