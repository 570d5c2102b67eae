"""A second set of weights, kept once on the host and swapped in for a forward pass: reference, teacher, old policy."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.hf_weights import model_tensors
from miles.residency.disk_store import round_up
from miles.residency.pinned import HostBuffer
from miles.utils.errors import UserError

_ALIGNMENT = 64  # bytes, of each weight in the copy


class HostWeights:
    """A copy of a model's weights as they are now, in one piece of host memory of their size, pinned beside a GPU.

    Args:
        chunks: the model's parts.
        whose: which weights these are, for the message.

    Raises:
        ValueError: the memory is not there, or can't be pinned.
    """

    def __init__(self, chunks: list[torch.nn.Module], whose: str):
        self._chunks = chunks
        weights = _weights(chunks)
        *starts, nbytes = accumulate((round_up(weight.nbytes, _ALIGNMENT) for weight in weights), initial=0)
        remedy = f"they are for the weights of {whose}: use hosts with more memory, share the model out, or do without"
        memory = HostBuffer(nbytes, any(weight.is_cuda for weight in weights), remedy).tensor
        self._weights = [
            memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
            for start, weight in zip(starts, weights, strict=True)
        ]
        self.take(torch.Tensor.detach)

    @torch.no_grad()
    def take(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Become the model's weights as `read` finds them: it takes one of its tensors, in a fixed order."""
        for current, weight in zip(_weights(self._chunks), self._weights, strict=True):
            weight.copy_(read(current))

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within it the model holds these weights; its own come back afterwards, bit for bit, whatever is raised.

        What is written to the model within it is kept here. Takes one parameter more of the device's memory, and none
        of the host's.
        """
        swapped = []
        try:
            for pair in zip(_weights(self._chunks), self._weights, strict=True):
                _swap(*pair)
                swapped.append(pair)
            yield
        finally:
            for pair in swapped:
                _swap(*pair)


def check_same_computation(flag: str, folder: str, own: PreTrainedConfig, other: PreTrainedConfig) -> None:
    """Raise ValueError naming what differs, unless `other`'s weights can be swapped into a model of `own`.

    Sizes alone do not tell: with another rope theta or norm epsilon the weights fit, and compute something else.
    flag, folder: what the user gave.
    """
    ours, theirs = _computation(own), _computation(other)
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        raise UserError(
            f"the model in {folder} ({flag}) computes otherwise than the one in --hf-checkpoint: they differ in "
            f"{', '.join(different)}; its weights take the other's place in one model, so choose one of the same "
            "architecture"
        )


def _computation(hf_config: PreTrainedConfig) -> dict[str, object]:
    """What a forward pass depends on besides weights."""
    family = family_for(hf_config)
    # Functions follow from the family; some are made anew each time.
    fields = {name: value for name, value in family.transformer_config(hf_config).items() if not callable(value)}
    ropes = {
        name: (rope.inv_freq_R.tolist(), rope.scale, rope.interleaved) for name, rope in family.ropes(hf_config).items()
    }
    layers = [family.attention_options(hf_config, layer) for layer in range(hf_config.num_hidden_layers)]
    return fields | {"family": type(family), "ropes": ropes, "attention": layers, "vocab_size": hf_config.vocab_size}


@torch.no_grad()
def _swap(current: torch.Tensor, weight: torch.Tensor) -> None:
    # The only line that can fail comes first: it takes memory.
    own = current.clone()
    current.copy_(weight)
    weight.copy_(own)


def _weights(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters, and the buffers that a checkpoint has (biases of a router)."""
    return [weight for chunk in chunks for weight in model_tensors(chunk).values()]
