"""How much a forward pass computes, from the shape of the model."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ForwardFlops:
    """Floating-point operations of a forward pass over one sample, a product and its sum being two.

    Of L tokens and R of them the response: per_token * L + per_response_token * R + per_pair * (pairs of a query and a
    key that it sees), of which causal attention has L^2 / 2, and within a window of w tokens w L - w^2 / 2.

    Args:
        per_token: 2 for each weight of the layers that a token meets.
        per_response_token: 2 for each weight of the output layer.
        per_pair: by window (None: none), 2 for each number of a query and of a value, of all layers with that window.
    """

    per_token: float
    per_response_token: float
    per_pair: Mapping[int | None, float]

    def of(self, lengths: np.ndarray, response_lengths: np.ndarray) -> np.ndarray:
        """Operations of each sample: float64 [samples]."""
        length = lengths.astype(np.float64)
        result = self.per_token * length + self.per_response_token * response_lengths
        for window, flops in self.per_pair.items():
            seen = length if window is None else np.minimum(length, window)
            result += flops * (seen * length - seen**2 / 2)
        return result


def checkpoint_flops(folder: str) -> ForwardFlops:
    """Of the language model whose config.json lies in `folder`."""
    from transformers import AutoConfig

    return forward_flops(AutoConfig.from_pretrained(folder).get_text_config().to_dict())


def forward_flops(shape: Mapping[str, Any]) -> ForwardFlops:
    """Operations of a model with this configuration, as transformers completes it.

    Counted are matrix products: attention (grouped heads, latent as in DeepSeek's, a gated delta net's projections),
    dense MLPs and the experts that a token goes to. Left out is what is small beside them: norms, rotations, routers,
    the delta net's recurrence and a sparse attention's indexer. Chunked attention counts as a window of its chunk.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    weights, pairs = 0, Counter[int | None]()
    for layer in range(layers):
        kind = shape["layer_types"][layer] if shape.get("layer_types") else None
        if kind == "linear_attention":
            weights += _delta_net_weights(shape)
        else:
            attention, numbers = _attention(shape)
            weights += attention
            pairs[_window(shape, kind)] += 2 * numbers
        weights += 3 * hidden * _mlp_width(shape, layer)
    return ForwardFlops(2 * weights, 2 * hidden * shape["vocab_size"], pairs)


def _attention(shape: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of an attention layer, and numbers that it multiplies for each pair: a query's and a value's."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    if shape.get("kv_lora_rank"):
        nope, rope, value = (shape[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        query_rank, rank = shape["q_lora_rank"], shape["kv_lora_rank"]
        size = heads * (nope + rope)
        weights = hidden * size if query_rank is None else query_rank * (hidden + size)
        weights += hidden * (rank + rope) + rank * heads * (nope + value) + hidden * heads * value
        return weights, heads * (nope + rope + value)
    size = shape.get("head_dim") or hidden // heads
    gates = heads if shape.get("linear_num_key_heads") else 0  # Qwen3-Next's attention has one for each query
    groups = shape.get("num_key_value_heads") or heads
    return hidden * size * (2 * heads + gates + 2 * groups), 2 * heads * size


def _delta_net_weights(shape: Mapping[str, Any]) -> int:
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    return shape["hidden_size"] * (2 * keys + 3 * values + 2 * shape["linear_num_value_heads"])


def _window(shape: Mapping[str, Any], kind: str | None) -> int | None:
    """Tokens that a query of a layer sees, itself among them; None for all before it."""
    if kind == "deepseek_sparse_attention":
        return shape["index_topk"]
    if kind == "chunked_attention":
        return shape["attention_chunk_size"]
    # Mistral has no kinds of layers: a window, if any, is all layers'.
    return shape.get("sliding_window") if kind in ("sliding_attention", None) else None


def _mlp_width(shape: Mapping[str, Any], layer: int) -> int:
    """Inner channels of a layer's MLP, or of the experts together that a token goes to."""
    dense = shape.get("intermediate_size_mlp") or shape["intermediate_size"]
    if not _has_experts(shape, layer):
        return dense
    width = shape.get("moe_intermediate_size") or shape["intermediate_size"]
    shared = shape.get("shared_expert_intermediate_size") or width * (shape.get("n_shared_experts") or 0)
    if "intermediate_size_mlp" in shape:
        shared = width  # Llama 4 has one that its configuration doesn't name
    return shape["num_experts_per_tok"] * width + shared


def _has_experts(shape: Mapping[str, Any], layer: int) -> bool:
    if not any(shape.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return False
    if shape.get("mlp_layer_types"):
        return shape["mlp_layer_types"][layer] == "sparse"
    if shape.get("moe_layers") is not None:
        return layer in shape["moe_layers"]
    if layer < shape.get("first_k_dense_replace", 0) or layer in (shape.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % shape.get("decoder_sparse_step", 1) == 0
