"""An engine as the weight sync sees it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTarget:
    """An engine and who serves it.

    Args:
        url: `http://host:port`.
        tp_size: its ranks.
        source_ranks: for each of them the trainer rank on the same machine (with GPUs: on the same GPU) whose memory it
            reads; the first one talks to the engine. None for a remote engine, which shares no memory with the
            trainer: rank 0 talks to it.

    Raises:
        ValueError: there is not one source rank for each rank.
    """

    url: str
    tp_size: int
    source_ranks: list[int] | None

    def __post_init__(self) -> None:
        if self.source_ranks is not None and len(self.source_ranks) != self.tp_size:
            raise ValueError(f"{self.url} has {self.tp_size} ranks, but source_ranks={self.source_ranks}")

    @property
    def lead(self) -> int:
        """The trainer rank that talks to the engine."""
        return 0 if self.source_ranks is None else self.source_ranks[0]
