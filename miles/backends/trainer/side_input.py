"""The micro-batch that a layer is computing: what a router that replays choices reads beside its hidden states.

Arguments of the layers between would have to carry it; instead the passes say which micro-batch is in the model.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from miles.training.packing import PackedBatch

# Not a ContextVar: on a GPU the backward pass, which recomputes, runs in a thread of torch's own.
_running: list[PackedBatch] = []


@contextmanager
def running(packed: PackedBatch) -> Iterator[None]:
    """Within it `packed` is the micro-batch in the model."""
    _running.append(packed)
    try:
        yield
    finally:
        _running.pop()


def micro_batch() -> PackedBatch:
    """The micro-batch in the model, in the forward pass and where activations are computed once more.

    Its `token_columns` have a row for each of this rank's tokens, in the order of the hidden states; under
    sequence parallelism a rank's hidden states are one of as many equal parts as there are tensor-parallel ranks.

    Raises:
        RuntimeError: no pass is running.
    """
    if not _running:
        raise RuntimeError("no micro-batch is in the model: a layer was called outside of a trainer's pass")
    return _running[-1]


def with_its_micro_batch(function: Callable) -> Callable:
    """`function`, which runs in the micro-batch of now whenever it is called: for what computes activations again."""
    if not _running:
        return function
    packed = _running[-1]

    @functools.wraps(function)
    def again(*args, **kwargs):
        with running(packed):
            return function(*args, **kwargs)

    return again
