"""Recomputed activations see the micro-batch that they belong to.

megatron-core 0.19.2 computes layers again in the backward pass without a word to its caller. By then another
micro-batch may be in the model (a pipeline's forward passes run ahead of its backward passes), or none: a layer that
asks `miles.backends.trainer.side_input` would read the wrong rows. Delete this once Megatron hands arguments of the
pass on to what it recomputes.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable

from megatron.core import tensor_parallel

from miles.backends.trainer.side_input import with_its_micro_batch

_MARK = "keeps_micro_batch"


def install() -> None:
    """Call it any number of times, before a model is built."""
    _wrap(tensor_parallel, "checkpoint", position=0)
    _wrap(tensor_parallel.CheckpointWithoutOutput, "checkpoint", position=1)
    if importlib.util.find_spec("transformer_engine") is not None:
        _wrap(importlib.import_module("transformer_engine.pytorch.distributed"), "checkpoint", position=0)


def _wrap(owner: object, name: str, position: int) -> None:
    """Let the function that `owner.name` gets as its argument at `position` keep its micro-batch."""
    original: Callable = getattr(owner, name)
    if _MARK in vars(original):
        return

    @functools.wraps(original)
    def checkpoint(*args, **kwargs):
        function = with_its_micro_batch(args[position])
        return original(*args[:position], function, *args[position + 1 :], **kwargs)

    vars(checkpoint)[_MARK] = True
    setattr(owner, name, checkpoint)
