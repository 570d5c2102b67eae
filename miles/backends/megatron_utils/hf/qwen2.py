"""Qwen2 and Qwen2.5, dense."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.hf.base import Family, sliding_window_problems


class Qwen2(Family):
    """Llama's layers with a bias on query, key and value."""

    architectures = ("Qwen2ForCausalLM",)
    qkv_bias = True

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + sliding_window_problems(hf_config)
