"""GLM-4.7-Flash: DeepSeek-V3's layers in other sizes."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.deepseek_v3 import DeepseekV3, mlp_layer_type_problems


class Glm4MoeLite(DeepseekV3):
    """config.json lists which layers are dense and which have experts."""

    architectures = ("Glm4MoeLiteForCausalLM",)

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + mlp_layer_type_problems(hf_config)
