"""The reference policy: a second set of weights, kept on the host and swapped in for one forward pass."""

import contextlib
from collections.abc import Iterator

import torch


class ReferenceWeights:
    """A copy of a model's weights as they are now, on the host (pinned beside a GPU)."""

    def __init__(self, model: torch.nn.Module):
        self._weights = [_host_copy(parameter) for parameter in model.parameters()]

    @contextlib.contextmanager
    def swapped_in(self, model: torch.nn.Module) -> Iterator[None]:
        """Within it `model` holds the reference's weights; its own come back afterwards, bit for bit."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: torch.nn.Module) -> None:
        """Swap the values of both; takes one parameter more of the device's memory, and none of the host's."""
        for parameter, weight in zip(model.parameters(), self._weights, strict=True):
            own = parameter.clone()
            parameter.copy_(weight)
            weight.copy_(own)


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
    return copy.copy_(parameter.detach())
