"""Elementwise functions as one kernel where that pays."""

import functools
from collections.abc import Callable

import torch


def fused(function: Callable, tensor: torch.Tensor) -> Callable:
    """`function` compiled by torch.compile if `tensor` is on a GPU, where eager steps wait for memory; else as it is.

    A function of many elementwise steps then reads and writes its tensors once. Compiled once for each function.
    """
    return _compiled(function) if tensor.is_cuda else function


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)
