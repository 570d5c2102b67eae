"""Vocabulary padding: Megatron cuts the table evenly over tensor-parallel ranks, Hugging Face stores its true size."""

import torch


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` that holds `vocab_size` rows."""
    return -(-vocab_size // tp_size) * tp_size


def vocab_shard(weight_VH: torch.Tensor, tp_rank: int, tp_size: int) -> torch.Tensor:
    """Rows of `weight_VH` that rank `tp_rank` holds; rows past the true vocabulary are zero."""
    vocab_size = weight_VH.shape[0]
    rows = padded_vocab_size(vocab_size, tp_size) // tp_size
    held = weight_VH[tp_rank * rows : min((tp_rank + 1) * rows, vocab_size)]
    if held.shape[0] == rows:
        return held
    return torch.cat([held, held.new_zeros(rows - held.shape[0], *held.shape[1:])])
