"""How much a forward pass computes, from the shape of the model."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from miles.hf.families import ModelShape, shape_of


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
    from miles.hf.config import load_hf_config

    return forward_flops(shape_of(load_hf_config(folder).to_dict()))


def forward_flops(shape: ModelShape) -> ForwardFlops:
    """Operations of a model whose configuration transformers has completed.

    Counted are matrix products: attention (grouped heads, latent as in DeepSeek's, a gated delta net's projections),
    dense MLPs and the experts that a token goes to. Left out is what is small beside them: norms, rotations, routers,
    the delta net's recurrence and a sparse attention's indexer. Chunked attention counts as a window of its chunk.
    """
    hidden = shape.fields["hidden_size"]
    weights, pairs = 0, defaultdict[int | None, float](float)
    for layer in range(shape.fields["num_hidden_layers"]):
        weights += shape.attention_weights(layer) + 3 * hidden * shape.mlp_width(layer)
        for window, numbers in shape.attention_pairs(layer).items():
            pairs[window] += 2 * numbers
    return ForwardFlops(2 * weights, 2 * hidden * shape.fields["vocab_size"], pairs)
