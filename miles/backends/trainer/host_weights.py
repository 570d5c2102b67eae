"""A second set of weights, kept once on the host and swapped in for a forward pass: reference, teacher, old policy."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from miles.residency.disk_store import round_up
from miles.residency.pinned import HostBuffer

_ALIGNMENT = 64  # bytes, of each weight in the copy


class HostWeights:
    """A copy of a model's weights as they are now, in one piece of host memory of their size, pinned beside a GPU.

    Args:
        weights: gives the model's tensors that are copied, always in one order (`TrainedModel.weights`).
        whose: which weights these are, for the message.

    Raises:
        ValueError: the memory is not there, or can't be pinned.
    """

    def __init__(self, weights: Callable[[], list[torch.Tensor]], whose: str):
        self._current = weights
        current = weights()
        *starts, nbytes = accumulate((round_up(weight.nbytes, _ALIGNMENT) for weight in current), initial=0)
        remedy = f"they are for the weights of {whose}: use hosts with more memory, share the model out, or do without"
        memory = HostBuffer(nbytes, any(weight.is_cuda for weight in current), remedy).tensor
        self._weights = [
            memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
            for start, weight in zip(starts, current, strict=True)
        ]
        self.take(torch.Tensor.detach)

    @torch.no_grad()
    def take(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Become the model's weights as `read` finds them: it takes one of its tensors, in a fixed order."""
        for current, weight in zip(self._current(), self._weights, strict=True):
            weight.copy_(read(current))

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within it the model holds these weights; its own come back afterwards, bit for bit, whatever is raised.

        What is written to the model within it is kept here. Takes one parameter more of the device's memory, and none
        of the host's.
        """
        swapped = []
        try:
            for pair in zip(self._current(), self._weights, strict=True):
                _swap(*pair)
                swapped.append(pair)
            yield
        finally:
            for pair in swapped:
                _swap(*pair)


@torch.no_grad()
def _swap(current: torch.Tensor, weight: torch.Tensor) -> None:
    # The only line that can fail comes first: it takes memory.
    own = current.clone()
    current.copy_(weight)
    weight.copy_(own)
