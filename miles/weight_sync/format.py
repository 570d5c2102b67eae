"""What an engine is sent for a tensor of the trainer: the tensor itself, or what an engine of another format holds."""

from collections.abc import Collection
from typing import Protocol

import torch

from miles.hf.fp8 import SCALES, quantise


class EngineFormat(Protocol):
    """Stands between a full tensor of the trainer and its places in a bucket: one in, one or several out."""

    def encode(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that an engine is sent for one of the trainer: a weight and its scales, for example.

        It is called with tensors on the meta device first: from what it gives for them the buckets are planned, with
        the memory that it takes. For values it must give the same names, shapes and dtypes.

        Args:
            name: in the checkpoint.
            tensor: full, in the trainer's dtype. It is not written to.

        Returns:
            {name by which the engine loads it: tensor}; views and `tensor` itself will do.
        """
        ...


class CheckpointFormat:
    """Engines that hold what the checkpoint holds, in the trainer's dtype."""

    def encode(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensor under its own name."""
        return {name: tensor}


class Fp8Format:
    """Engines that hold some weights as FP8 in blocks of 128 x 128 (--rollout-fp8).

    Args:
        weights: the names of these.
    """

    def __init__(self, weights: Collection[str]):
        self.weights = frozenset(weights)

    def encode(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes under the weight's name and its blocks' scales; the tensor itself for others."""
        if name not in self.weights:
            return {name: tensor}
        codes, scales = quantise(tensor)
        return {name: codes, name + SCALES: scales}
