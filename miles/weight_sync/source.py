"""What the sync asks of a trainer: which tensors it has, and how a bucket of them is filled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from miles.hf.checkpoint import CheckpointIndex

# Takes the name and the full value of a tensor of the source, which is copied.
Write = Callable[[str, torch.Tensor], None]


class Read(Protocol):
    """From a parameter or buffer of this rank to a tensor of its dtype with its current values, on its device.

    A fresh tensor, or its own memory: it is not written to. `expert`: of a parameter that holds several experts along
    dimension 0, the one that is wanted; None for all of it.
    """

    def __call__(self, parameter: torch.Tensor, expert: int | None = None, /) -> torch.Tensor: ...


def live(parameter: torch.Tensor, expert: int | None = None) -> torch.Tensor:
    """The `Read` of a model whose parameters are in memory."""
    return parameter.detach() if expert is None else parameter.detach()[expert]


def part_shape(parameter: torch.Tensor, expert: int | None) -> torch.Size:
    """The shape of what `Read` gives."""
    return parameter.shape if expert is None else parameter.shape[1:]


@dataclass(frozen=True)
class FullTensor:
    """A tensor before it has values: its name, full shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class SourcePart:
    """What a source gives in one go: as a rule, the checkpoint's tensors that one parameter holds.

    Args:
        key: by which the source knows it.
        tensors: what is given, under the checkpoint's names.
        stage: the pipeline stage whose ranks hold it.
        owner: among the ranks that share out the stage's experts, the only one that has it; None where all have it.
        atomic: parts with the same key must reach an engine in one call.
        scratch: bytes that making its tensors takes for a moment, beside the memory that they are written to.
    """

    key: Any
    tensors: tuple[FullTensor, ...]
    stage: int = 0
    owner: int | None = None
    atomic: str | None = None
    scratch: int = 0


class WeightSource(Protocol):
    """The weights that a sync sends, of a model that is cut over the trainer's ranks; one on each rank.

    All ranks make the same calls, in the same order: each may be a collective one.

    Attributes:
        device: where the weights are, and buckets are made.
        stage: the pipeline stage of this rank.
        stages: how many there are.
        index: the checkpoint that the model came from, whose names it uses.
        untrained: names of what that has beyond the model (layers for further tokens): an export copies it.
    """

    device: torch.device
    stage: int
    stages: int
    index: CheckpointIndex
    untrained: Sequence[str]

    def parts(self, limit: int) -> list[SourcePart]:
        """All that is sent, in order: the same on every rank.

        Args:
            limit: bytes of a bucket, by which a source chooses how much it makes at a time.
        """
        ...

    def fill(self, parts: Sequence[SourcePart], limit: int, write: Write) -> Exception | None:
        """Give `write` those tensors of `parts` that this rank can have; their stage's ranks call it.

        The collective calls are made to their end even where this rank can't read a weight. Whatever else fails is
        raised, and leaves the other ranks in a collective call.

        Args:
            parts: of one bucket.
            limit: as `parts` was called with.
            write: copies a tensor. It is called once for each.

        Returns:
            What reading raised first, with the weight's name as a note.
        """
        ...

    def share_owned(self, piece: torch.Tensor, owner: int) -> None:
        """Bring the bytes of `piece` from the rank `owner` of `SourcePart` to those that share experts with it."""
        ...

    def share_stage(self, flat: torch.Tensor, stage: int) -> None:
        """Bring the bytes of a filled bucket from the ranks of its stage to those of all others."""
        ...
