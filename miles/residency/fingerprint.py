"""A 64-bit fingerprint of a tensor, to show that a sleep and a wake changed nothing."""

import hashlib

import torch

CHUNK = 2**21  # int64 words hashed at a time: 16 MiB, and as much again for each of two temporaries
MASK = 2**64 - 1
POSITION, MULTIPLIER = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd constants of splitmix64


def fingerprint(tensor: torch.Tensor) -> int:
    """The fingerprint of a tensor's bytes, dtype and shape: the same number on a CPU and on a GPU.

    Any one changed word changes it for certain; a swap, or any other change, with a chance of all but 2**-64.
    Computed on the tensor's device in bounded extra memory (a copy of the tensor if it is not contiguous).
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = torch.zeros(min(CHUNK, -(-flat.numel() // 8)), dtype=torch.int64, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(len(words), dtype=torch.int64, device=flat.device).mul_(_signed(POSITION))
    for start in range(0, flat.numel(), 8 * CHUNK):
        part = flat[start : start + 8 * CHUNK]
        count = -(-len(part) // 8)
        mixed = words[:count]
        mixed[-1:].zero_()  # the padding after a size that is not a multiple of 8
        mixed.view(torch.uint8)[: len(part)].copy_(part)
        # The words are mixed beyond a product with their position, under which some swaps would go unseen.
        mixed.add_(places[:count]).add_(_signed(start // 8 * POSITION))
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF)).mul_(_signed(MULTIPLIER))
        mixed.bitwise_xor_((mixed >> 29).bitwise_and_(0x7FFFFFFFF))
        total.add_(mixed.sum())
    kind = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8).digest()
    return (int(total.item()) + int.from_bytes(kind)) & MASK


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`: torch has no wrapping uint64."""
    return (value + 2**63 & MASK) - 2**63
