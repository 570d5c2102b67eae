"""Qwen3, dense."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.hf.base import Family, sliding_window_problems


class Qwen3(Family):
    """Llama's layers with an RMS norm on each query and key head, and a head width of its own."""

    architectures = ("Qwen3ForCausalLM",)
    qk_norm = True

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + sliding_window_problems(hf_config)
