"""Gemma 2, dense."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family, layer_type_problems, layer_window
from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.norms import PlusOneNorm
from miles.backends.megatron_utils.parts.post_norm import RowParallelPostPlusOneNorm
from miles.backends.megatron_utils.parts.specs import dense_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Gated, Row


class Gemma2(Family):
    """Norms of weight + 1 before and after attention and MLP, scaled embeddings, capped scores and logits."""

    architectures = ("Gemma2ForCausalLM",)
    final_norm = PlusOneNorm
    post_attention_norm = "post_attention_layernorm"

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return super().problems(hf_config) + layer_type_problems(hf_config)

    def allowed_values(self) -> dict[str, tuple]:
        allowed = super().allowed_values()
        # Checkpoints list it too, but `hidden_activation` is what transformers reads.
        del allowed["hidden_act"]
        return {**allowed, "hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)}

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        return super().transformer_config(hf_config) | dict(
            activation_func=partial(F.gelu, approximate="tanh"), softmax_scale=hf_config.query_pre_attn_scalar**-0.5
        )

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(window=layer_window(hf_config, layer), softcap=hf_config.attn_logit_softcapping)

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        norms = dict.fromkeys(("q_norm", "k_norm"), PlusOneNorm if self.qk_norm else None)
        options = self.attention_options(hf_config, layer)
        return dense_layer(megatron_config, options, norm=PlusOneNorm, row=RowParallelPostPlusOneNorm, **norms)

    def after_build(self, hf_config: PreTrainedConfig, model: GPTModel) -> None:
        """Multiply embeddings by the root of their size, which transformers and SGLang round to the weights' dtype."""
        model.logit_softcap = hf_config.final_logit_softcapping
        if model.pre_process:
            dtype = model.embedding.word_embeddings.weight.dtype
            factor = torch.tensor(hf_config.hidden_size**0.5, dtype=dtype).item()
            model.embedding.register_forward_hook(lambda _module, _inputs, output: output * factor)

    def mlp_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        hidden, ffn = hf_config.hidden_size, hf_config.intermediate_size
        hf_mlp, mlp = hf + "mlp.", megatron + "mlp."
        gated = (hf_mlp + "gate_proj.weight", hf_mlp + "up_proj.weight")
        return [
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "pre_feedforward_layernorm.weight", hidden),
            Entry(Gated(), mlp + "linear_fc1.weight", gated, ((ffn, hidden), (ffn, hidden))),
            Entry(Row(), mlp + "linear_fc2.weight", (hf_mlp + "down_proj.weight",), ((hidden, ffn),)),
            norm_entry(mlp + "linear_fc2.post_layernorm.weight", hf + "post_feedforward_layernorm.weight", hidden),
        ]
