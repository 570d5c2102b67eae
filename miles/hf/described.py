"""What a checkpoint's config.json says of the model, in the words that trainers use for their flags."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.hf.families import shape_of
from miles.hf.families.traits import TRAITS, Traits
from miles.hf.shape import read_config_json


class DescribedModel:
    """A model as its config.json and the traits of its architecture describe it.

    A property is None where neither says it, so that nothing can contradict it.

    Args:
        config: config.json. What it says of the language model wins over what it says of the whole.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.fields: dict[str, Any] = {**config, **(config.get("text_config") or {})}
        self.shape = shape_of(self.fields)
        architectures = config.get("architectures") or [""]
        self.architecture: str = architectures[0]
        self.traits: Traits | None = TRAITS.get(self.architecture)

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys of config.json that has one."""
        return next((self.fields[key] for key in keys if self.fields.get(key) is not None), None)

    def trait(self, name: str) -> Any:
        """A trait of the architecture; None of an unknown one."""
        return None if self.traits is None else getattr(self.traits, name)

    @property
    def family_names(self) -> set[str]:
        """How the family is called: its `model_type` and its architecture, in letters and digits alone."""
        names = (str(self.fields.get("model_type") or "").split("_")[0], self.architecture.split("For")[0])
        return {bare(name) for name in names} - {""}

    # Widths

    @property
    def is_latent(self) -> bool:
        """Whether attention has a latent, of keys and values or of queries alone."""
        return self.shape.is_latent or bool(self.get("q_lora_rank"))

    @property
    def head_dim(self) -> int | None:
        """Width of a head, where all that a head holds has one."""
        if self.is_latent or self.get("head_dim", "hidden_size") is None:
            return None
        return self.shape.head_dim if self.get("head_dim") or self.get("num_attention_heads") else None

    @property
    def dense_width(self) -> int | None:
        """Width of a dense MLP; None where no layer has one, or config.json does not say it."""
        if self.fields.get("model_type") in ("qwen3_5_moe_text", "deepseek_v4"):
            return None
        return self.get("intermediate_size_mlp", "intermediate_size")

    @property
    def expert_width(self) -> int | None:
        """Width of one expert."""
        return self.get("moe_intermediate_size", "intermediate_size") if self.shape.num_experts else None

    @property
    def shared_width(self) -> int | None:
        """Width of the shared experts together; 0 where there is none."""
        if (width := self.get("shared_expert_intermediate_size")) is not None:
            return width
        count = self.get("n_shared_experts")
        return None if count is None or self.expert_width is None else count * self.expert_width

    @property
    def shared_gate(self) -> bool | None:
        """Whether the shared expert's output is weighed by a gate of its own."""
        return None if self.shared_width is None else "shared_expert_intermediate_size" in self.fields

    @property
    def layers_with_experts(self) -> list[int] | None:
        """For each layer whether its MLP is one of experts."""
        count = self.get("num_hidden_layers")
        return None if count is None else [int(self.shape.has_experts(layer)) for layer in range(count)]

    @property
    def layers_with_windows(self) -> list[int] | None:
        """For each layer whether its attention has a window, where that differs."""
        kinds = self.get("layer_types")
        return None if kinds is None else [int(kind == "sliding_attention") for kind in kinds]

    # Positions

    @property
    def rope(self) -> dict[str, Any]:
        """The parameters of the rotary positions, of full attention where kinds of layers have their own."""
        rope = {**(self.get("rope_scaling") or {}), **(self.get("rope_parameters") or {})}
        inner = rope.get("full_attention") or rope.get("main")
        return inner if isinstance(inner, dict) else rope

    @property
    def rope_base(self) -> float | None:
        """The base of the rotary frequencies."""
        base = self.rope.get("rope_theta")
        return self.get("rope_theta") if base is None else base

    @property
    def rope_kind(self) -> str | None:
        """The kind of scaling of the rotary frequencies, `rope` where they are not scaled."""
        kind = self.rope.get("rope_type") or self.rope.get("type") or "default"
        return "rope" if kind == "default" else kind

    @property
    def rope_factor(self) -> float | None:
        """By how much rotary positions are stretched."""
        return 1.0 if self.rope_kind == "rope" else self.rope.get("factor")

    @property
    def rotary_share(self) -> float | None:
        """The share of a head's channels that is turned."""
        if self.is_latent:
            return 1.0  # of the channels that are kept for positions
        if (turned := self.get("rotary_dim")) is not None and self.head_dim:
            return turned / self.head_dim
        share = self.rope.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        return 1.0 if share is None else share

    # Kinds of layers

    @property
    def qk_norm(self) -> bool | None:
        """Whether queries and keys pass a norm."""
        if self.is_latent:
            return True
        return self.get("use_qk_norm") if "use_qk_norm" in self.fields else self.trait("qk_norm")

    @property
    def qkv_bias(self) -> bool | None:
        """Whether query, key and value have biases."""
        return self.get("attention_bias") if "attention_bias" in self.fields else self.trait("qkv_bias")

    @property
    def gated(self) -> bool | None:
        """Whether an MLP is SwiGLU."""
        kind = self.get("hidden_act", "hidden_activation")
        return None if kind is None else kind in ("silu", "swish")

    @property
    def untied(self) -> bool | None:
        """Whether the head has weights of its own."""
        tied = self.get("tie_word_embeddings")
        return None if tied is None else not tied

    @property
    def score(self) -> str | None:
        """How a router scores experts."""
        return self.get("scoring_func") or self.trait("score")

    @property
    def scores_first(self) -> bool | None:
        """Whether a router's softmax is over all experts and stays as it is for those chosen."""
        normed = self.get("norm_topk_prob")
        return None if self.score != "softmax" or normed is None else not normed

    @property
    def selection_bias(self) -> bool | None:
        """Whether a bias takes part in the choice of experts, as with DeepSeek."""
        return None if self.score is None else self.score != "softmax" and "Llama4" not in self.architecture

    @property
    def score_factor(self) -> float | None:
        """What the experts' sum is multiplied by."""
        factor = self.get("routed_scaling_factor")
        return 1.0 if factor is None and self.score == "softmax" else factor


def describe(folder: str | Path) -> DescribedModel | None:
    """The model in a folder; None where its config.json cannot be read, which a rule of the flag says."""
    try:
        config = read_config_json(folder)
    except (OSError, ValueError):
        return None
    return DescribedModel(config) if isinstance(config, dict) else None


def bare(name: str) -> str:
    """A name in lower-case letters and digits alone."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
