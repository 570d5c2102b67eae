"""What Megatron reads off a parameter."""

import torch


def mark(parameter: torch.nn.Parameter, **marks: bool | int) -> None:
    """Give it attributes of Megatron's, which torch's type does not have.

    `sequence_parallel`: each rank sees its own part of the tokens, so gradients are added up over the tensor-parallel
    ranks. `tensor_model_parallel`, `partition_dim`, `partition_stride`: it is one rank's part, cut along a dimension.
    """
    vars(parameter).update(marks)
