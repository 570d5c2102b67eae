"""Mistral, Ministral and Ministral 3, dense."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family, layer_type_problems, layer_window
from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.rope import Rope, rope_of

# Of what Ministral 3's config.json has among its rope parameters.
_NOT_OF_THE_ROPE = {"llama_4_scaling_beta", "max_position_embeddings"}


class Mistral(Family):
    """Llama's layers, all with the same sliding window where config.json gives one.

    SGLang's class of this name has no window: beyond it the engine's log-probabilities are another model's.
    """

    architectures = ("MistralForCausalLM",)

    def allowed_values(self) -> dict[str, tuple]:
        # transformers gives every Mistral layer the same window; kinds of layers are Ministral's.
        return {**super().allowed_values(), "layer_types": (None,)}

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(window=hf_config.sliding_window)


class Ministral(Family):
    """Llama's layers, with a sliding window in those that `layer_types` names."""

    architectures = ("MinistralForCausalLM",)

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + layer_type_problems(hf_config)

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(window=layer_window(hf_config, layer))


class Ministral3(Mistral):
    """Mistral's layers, with queries scaled up beyond the length of the first training."""

    architectures = ("Ministral3ForCausalLM",)

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        # transformers multiplies every query by this scale and fails without its parameters.
        given = hf_config.rope_parameters
        missing = [
            f"rope_parameters.{name}={given.get(name)!r} (taken: a number)"
            for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
            if given.get(name) is None
        ]
        return super().problems(hf_config) + missing

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        # The others have nothing to do with the rope, and transformers warns of them.
        parameters = {name: value for name, value in hf_config.rope_parameters.items() if name not in _NOT_OF_THE_ROPE}
        return {"default": rope_of(hf_config, parameters)}

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        rope = hf_config.rope_parameters
        temperature = (rope["original_max_position_embeddings"], rope["llama_4_scaling_beta"], 0)
        return AttentionOptions(window=hf_config.sliding_window, temperature=temperature)
