"""What a parameter of the trainer's model holds of a checkpoint."""

from dataclasses import dataclass

from miles.hf.layouts import Layout, Replicated

EMBEDDING = "model.embed_tokens.weight"
EMBEDDING_END = "embed_tokens.weight"  # whatever the prefix of a model that sees as well
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter, or one expert's part of it, and the Hugging Face tensors that it holds.

    The experts of a rank are one parameter, along dimension 0.

    Args:
        kind: how the parameter is cut from the tensors; an expert's by expert tensor parallelism, others by tensor
            parallelism.
        megatron_name: as in a model chunk, whose layers count from 0.
        hf_names: the full tensors, as the checkpoint has them.
        shapes: one for each.
        load_only: a copy of a tensor that another stage owns (the tied head): loaded, never gathered.
        ep_rank: for one expert's weight, the only expert-parallel rank that holds it.
        expert: for one expert's weight, its number among those of that rank.
        stacked: the checkpoint's tensors hold all experts along dimension 0, of which a rank holds its share.
        atomic: entries with the same key must reach an engine in one call.
    """

    kind: Layout
    megatron_name: str
    hf_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    load_only: bool = False
    ep_rank: int | None = None
    expert: int | None = None
    stacked: bool = False
    atomic: str | None = None

    @property
    def is_expert(self) -> bool:
        """Whether it is cut over expert-parallel ranks."""
        return self.ep_rank is not None or self.stacked


def norm_entry(megatron_name: str, hf_name: str, size: int) -> Entry:
    """A norm's weight of `size` elements, whole on every rank."""
    return Entry(Replicated(), megatron_name, (hf_name,), ((size,),))
