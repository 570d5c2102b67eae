"""Gemma 3, the text model."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import layer_window
from miles.backends.megatron_utils.families.gemma2 import Gemma2
from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.rope import Rope, rope_of, rope_problems


class Gemma3(Gemma2):
    """Gemma 2's layers with norms on each query and key head; full and windowed layers have a rope each."""

    architectures = ("Gemma3ForCausalLM",)
    qk_norm = True

    def allowed_values(self) -> dict[str, tuple]:
        # transformers reads no cap of the scores here.
        return {**super().allowed_values(), "attn_logit_softcapping": (None,)}

    def rope_problems(self, hf_config: PreTrainedConfig) -> list[str]:
        ropes = hf_config.rope_parameters.items()
        return [problem for name, rope in ropes for problem in rope_problems(rope, f"rope_parameters.{name}")]

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        return {name: rope_of(hf_config, parameters) for name, parameters in hf_config.rope_parameters.items()}

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(rope=hf_config.layer_types[layer], window=layer_window(hf_config, layer))
