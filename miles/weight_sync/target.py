"""An engine as the weight sync sees it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTarget:
    """An engine and who serves it.

    source_ranks: for each tensor-parallel rank of the engine, the trainer rank on the same machine (with GPUs: on the
    same GPU) whose memory it reads. The first of them talks to the engine.
    """

    url: str
    tp_size: int
    source_ranks: list[int]

    def __post_init__(self) -> None:
        if len(self.source_ranks) != self.tp_size:
            raise ValueError(f"{self.url} has {self.tp_size} ranks, but source_ranks={self.source_ranks}")
