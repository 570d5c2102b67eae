"""The reference policy: a second set of weights, kept on the host and swapped in for one forward pass."""

import contextlib
from collections.abc import Iterator

import torch

from miles.backends.megatron_utils.hf.checkpoint_io import model_tensors


class ReferenceWeights:
    """A copy of a model's weights as they are now, on the host (pinned beside a GPU). chunks: the model's parts."""

    def __init__(self, chunks: list[torch.nn.Module]):
        self._weights = [_host_copy(weight) for weight in _weights(chunks)]

    @contextlib.contextmanager
    def swapped_in(self, chunks: list[torch.nn.Module]) -> Iterator[None]:
        """Within it the model holds the reference's weights; its own come back afterwards, bit for bit."""
        self._exchange(chunks)
        try:
            yield
        finally:
            self._exchange(chunks)

    @torch.no_grad()
    def _exchange(self, chunks: list[torch.nn.Module]) -> None:
        """Swap the values of both; takes one parameter more of the device's memory, and none of the host's."""
        for current, weight in zip(_weights(chunks), self._weights, strict=True):
            own = current.clone()
            current.copy_(weight)
            weight.copy_(own)


def _weights(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters, and the buffers that a checkpoint has (biases of a router)."""
    return [weight for chunk in chunks for weight in model_tensors(chunk).values()]


def _host_copy(weight: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
    return copy.copy_(weight.detach())
