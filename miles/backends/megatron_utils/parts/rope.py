"""Rotary position embedding (Su et al. 2021): a model's frequencies, and the rotation of queries and keys.

Shapes: T tokens, N heads, D head size, R its rotated part (the first R of D), R/2 frequencies.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles.utils.errors import UserError
from miles.utils.fused import fused

# Kinds of scaling whose frequencies depend on the configuration alone, not on a sequence's length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, eq=False)
class Rope:
    """How one kind of layer rotates.

    Args:
        inv_freq_R: float32 [R/2], radians by which each pair turns from one position to the next.
        scale: multiplies cosines and sines (yarn's attention factor).
        interleaved: pairs are neighbours (0, 1), (2, 3), ...; otherwise the i-th of one half and of the other.
    """

    inv_freq_R: torch.Tensor
    scale: float = 1.0
    interleaved: bool = False

    def angles(self, position_ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [T, 1, R], of int64 positions [T] in their own sequences; `scale` is in them."""
        turns_TR = position_ids_T[:, None].float() * self.inv_freq_R.to(position_ids_T.device)
        turns_TR = turns_TR.repeat_interleave(2, dim=1) if self.interleaved else torch.cat((turns_TR, turns_TR), dim=1)
        cos_T1R, sin_T1R = turns_TR[:, None].cos(), turns_TR[:, None].sin()
        return (cos_T1R, sin_T1R) if self.scale == 1.0 else (cos_T1R * self.scale, sin_T1R * self.scale)


def rope_of(
    hf_config: PreTrainedConfig,
    parameters: dict[str, Any] | None = None,
    interleaved: bool = False,
    dim: int | None = None,
) -> Rope:
    """The rope of a Hugging Face configuration: frequencies and attention factor as transformers computes them.

    Args:
        parameters: one rope's parameters, where the model has several; by default `hf_config.rope_parameters`.
        interleaved: see `Rope`; config.json does not say it, each architecture fixes it.
        dim: R, the rotated part of a head; by default the head size times `partial_rotary_factor`.

    Raises:
        ValueError: the kind of scaling is not one of ROPE_TYPES.
    """
    parameters = dict(hf_config.rope_parameters if parameters is None else parameters)
    kind = parameters["rope_type"]
    if problems := rope_problems(parameters):
        raise UserError(f"config.json of a {hf_config.model_type} is not supported: {'; '.join(problems)}")
    if dim is None:
        head_dim = hf_config.to_dict().get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if kind == "default":
        exponent_R = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return Rope(1.0 / parameters["rope_theta"] ** exponent_R, interleaved=interleaved)
    # transformers' functions read these fields only; a model's own configuration could hold another rope's.
    fields = PreTrainedConfig(
        rope_parameters={**parameters, "partial_rotary_factor": 1.0},
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=hf_config.max_position_embeddings,
    )
    inv_freq_R, scale = ROPE_INIT_FUNCTIONS[kind](fields, torch.device("cpu"))
    return Rope(inv_freq_R.float(), scale, interleaved)


def rope_problems(parameters: dict[str, Any], name: str = "rope_parameters") -> list[str]:
    """What `rope_of` would refuse in one rope's parameters; `name` is what config.json calls them."""
    kind = parameters["rope_type"]
    return [] if kind in ROPE_TYPES else [f"{name}.rope_type={kind!r} (taken: {', '.join(map(repr, ROPE_TYPES))})"]


def rotate(
    x_TND: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate the first R of each head of queries or keys by `Rope.angles`; the rest of D is passed on.

    Computed in float32, as the engine does it, in whatever type the model runs.
    """
    return _Rotate.apply(x_TND, cos_T1R, sin_T1R, interleaved)


class _Rotate(torch.autograd.Function):
    """Su et al. 2021, eq. 34. A rotation's gradient is the rotation back, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx, x_TND, cos_T1R, sin_T1R, interleaved):
        ctx.save_for_backward(cos_T1R, sin_T1R)
        ctx.interleaved = interleaved
        return fused(_rotated, x_TND)(x_TND, cos_T1R, sin_T1R, interleaved)

    @staticmethod
    def backward(ctx, grad_TND):
        cos_T1R, sin_T1R = ctx.saved_tensors
        grad_TND = fused(_rotated, grad_TND)(grad_TND, cos_T1R, -sin_T1R, ctx.interleaved)
        return grad_TND, None, None, None


def _rotated(x_TND: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, interleaved: bool) -> torch.Tensor:
    size = cos_T1R.shape[-1]
    x_TNR = x_TND[..., :size].float()
    if interleaved:
        first, second = x_TNR[..., 0::2], x_TNR[..., 1::2]
        turned_TNR = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = x_TNR.chunk(2, dim=-1)
        turned_TNR = torch.cat((-second, first), dim=-1)
    rotated = (x_TNR * cos_T1R + turned_TNR * sin_T1R).to(x_TND.dtype)
    return rotated if size == x_TND.shape[-1] else torch.cat((rotated, x_TND[..., size:]), dim=-1)
