"""How a trainer's ranks share a model, and where one of them stands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelSizes:
    """How the trainer's ranks share the work; world = tp * pp * cp * dp.

    Args:
        tp: ranks that split a layer.
        pp: ranks that split the stack of layers.
        cp: ranks that split the sequence.
        ep: ranks that share experts out.
        etp: ranks that split one expert.
        dp: copies that split the batch.
        sequence_parallel: what is not split within a layer is split along the sequence.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sequence_parallel: bool = False


type Group = Callable[[], ProcessGroup]


def no_group() -> "ProcessGroup":
    """The group of a parallel size of 1, which nothing asks for."""
    raise AssertionError("a group was asked for where its size is 1")


@dataclass(frozen=True)
class ParallelInfo:
    """A rank's place in the grid of one model copy.

    Groups have the order of the ranks. They are asked for at each use (never where the size is 1): a trainer destroys
    its groups to sleep and has new ones afterwards.

    Args:
        tp_rank, tp_size, tp_group: of tensor parallelism.
        pp_rank, pp_size, pp_group: of pipeline parallelism.
        chunk_layers: the global layer numbers of [pipeline stage][chunk of its model].
        ep_rank, ep_size, ep_group: of expert parallelism.
        etp_rank, etp_size, etp_group: of the tensor parallelism of experts.
    """

    tp_rank: int
    tp_size: int
    tp_group: Group
    pp_rank: int
    pp_size: int
    pp_group: Group
    chunk_layers: list[list[range]]
    ep_rank: int = 0
    ep_size: int = 1
    ep_group: Group = no_group
    etp_rank: int = 0
    etp_size: int = 1
    etp_group: Group = no_group
