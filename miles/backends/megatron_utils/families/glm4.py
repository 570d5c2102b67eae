"""GLM-4 (0414), dense."""

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.parts.post_norm import RowParallelPostNorm
from miles.backends.megatron_utils.parts.rope import Rope, rope_of
from miles.backends.megatron_utils.parts.specs import dense_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Row, Sections


class Glm4(Family):
    """Llama's layers with a norm after attention and MLP too, half of each head rotated in neighbouring pairs."""

    architectures = ("Glm4ForCausalLM",)
    post_attention_norm = "post_self_attn_layernorm"

    def allowed_values(self) -> dict[str, tuple]:
        return {**super().allowed_values(), "attention_bias": (False, True)}

    def has_qkv_bias(self, hf_config: PreTrainedConfig) -> bool:
        return hf_config.attention_bias

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        return {"default": rope_of(hf_config, interleaved=True)}

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        return dense_layer(megatron_config, self.attention_options(hf_config, layer), row=RowParallelPostNorm)

    def mlp_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        hidden, ffn = hf_config.hidden_size, hf_config.intermediate_size
        hf_mlp, mlp = hf + "mlp.", megatron + "mlp."
        return [
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(
                Sections(((ffn, ffn),)),
                mlp + "linear_fc1.weight",
                (hf_mlp + "gate_up_proj.weight",),
                ((2 * ffn, hidden),),
            ),
            Entry(Row(), mlp + "linear_fc2.weight", (hf_mlp + "down_proj.weight",), ((hidden, ffn),)),
            norm_entry(mlp + "linear_fc2.post_layernorm.weight", hf + "post_mlp_layernorm.weight", hidden),
        ]
