"""What the architectures that can be trained have and config.json does not say.

A table by the first of config.json's `architectures`. Nothing here needs torch: it is asked before anything starts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What all models of an architecture have in common.

    Args:
        qk_norm: queries and keys pass a norm, unless config.json has `use_qk_norm` and denies it.
        qkv_bias: query, key and value have biases, unless config.json has `attention_bias`.
        linear_bias: the other linear layers have biases too.
        plus_one_norm: a norm multiplies by 1 + its weight.
        post_norms: attention and MLP end in a norm.
        interleaved: rotary positions turn neighbouring channels, not those half a head apart.
        sinks: each head's softmax has a learned number in its sum.
        score: how a router scores experts, unless config.json has `scoring_func`.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    plus_one_norm: bool = False
    post_norms: bool = False
    interleaved: bool = False
    sinks: bool = False
    score: str = "softmax"


_PLAIN = Traits()
_LATENT = Traits(qk_norm=True, interleaved=True, score="sigmoid")
_GATED = Traits(qk_norm=True, plus_one_norm=True)
_LLAMA4 = Traits(interleaved=True, score="sigmoid")

TRAITS: dict[str, Traits] = {
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "DeepseekV4ForCausalLM": Traits(qk_norm=True, interleaved=True, sinks=True, score="sqrtsoftplus"),
    "Gemma2ForCausalLM": Traits(plus_one_norm=True, post_norms=True),
    "Gemma3ForCausalLM": Traits(qk_norm=True, plus_one_norm=True, post_norms=True),
    "Glm4ForCausalLM": Traits(qkv_bias=True, post_norms=True, interleaved=True),
    "Glm4MoeForCausalLM": Traits(qk_norm=True, qkv_bias=True, score="sigmoid"),
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GptOssForCausalLM": Traits(qkv_bias=True, linear_bias=True, sinks=True),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "LlamaForCausalLM": _PLAIN,
    "MiniMaxM2ForCausalLM": Traits(qk_norm=True, score="sigmoid"),
    "Ministral3ForCausalLM": _PLAIN,
    "MinistralForCausalLM": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": Traits(qkv_bias=True),
    "Qwen3ForCausalLM": Traits(qk_norm=True),
    "Qwen3MoeForCausalLM": Traits(qk_norm=True),
    "Qwen3NextForCausalLM": _GATED,
    "Qwen3_5ForCausalLM": _GATED,
    "Qwen3_5ForConditionalGeneration": _GATED,
    "Qwen3_5MoeForCausalLM": _GATED,
    "Qwen3_5MoeForConditionalGeneration": _GATED,
}
