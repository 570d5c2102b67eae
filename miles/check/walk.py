"""Where everything is in each phase: the planner's moves, one after the other, and what each place then holds."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from miles.check.contents import Bytes, Contents, Item
from miles.config import RunConfig
from miles.config.residency import policy_of
from miles.residency.plan import Move, Party, Phase, Place, Region, Step, Sync, plan, start


class Column(StrEnum):
    """The phases of a ledger, in their order. `wake`: from the engines' last answer to the trainer's first pass."""

    ENGINES_UP = "engines up"
    BUILT = "trainer built"
    SYNC = "sync"
    GENERATE = "generate"
    WAKE = "wake"
    TRAIN = "train"
    SAVE = "save"


@dataclass
class Walk:
    """One GPU, and its part of the host's memory, through a run's start and one step of it.

    Args:
        config: the run's configuration.
        contents: what the GPU's parties have.

    Attributes:
        gpu: by phase, what the GPU holds at the phase's highest moment.
        pinned: by phase, the most bytes of pinned host memory.
        disk: the most bytes of the trainer's files.
        copied: bytes of a step from the GPU to host or disk, "out", and back, "in".
    """

    config: RunConfig
    contents: Contents
    gpu: dict[Column, Bytes] = field(default_factory=dict)
    pinned: dict[Column, float] = field(default_factory=dict)
    disk: float = 0.0
    copied: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._policy = policy_of(self.config)
        self._places: dict[tuple[Party, Region], Place] = {}
        self._buffers: set[tuple[Party, Region]] = set()
        self._files: set[tuple[Party, Region]] = set()
        if self.config.needs_engines:
            self._begin(Party.ENGINE)
            self._note(Column.ENGINES_UP)
        if self.config.needs_engines and self.config.needs_trainer:
            self._both()
        elif self.config.needs_trainer:
            self._begin(Party.ACTOR)
            self._note(Column.BUILT)
            self._train()
        else:
            self._note(Column.GENERATE, self.contents.generate)

    def _both(self) -> None:
        policy = self._policy
        self._run(Column.ENGINES_UP, plan(Phase.ENGINES_UP, policy))
        for party, phase in ((Party.ACTOR, Phase.TRAINER_BUILT), (Party.CRITIC, Phase.CRITIC_BUILT)):
            self._begin(party)
            self._note(Column.BUILT)
            self._run(Column.BUILT, plan(phase, policy))
        self._run(Column.SYNC, plan(Phase.FIRST_SYNC, policy))
        self._note(Column.GENERATE, self.contents.generate)
        self.copied.clear()
        self._run(Column.WAKE, plan(Phase.AFTER_GENERATE, policy))
        self._train()
        self._run(Column.SYNC, plan(Phase.AFTER_TRAIN, policy))
        if not self.config.colocate:
            # Nothing moves: both sides work at the same time, each on its own GPUs.
            return
        self._note(Column.GENERATE, self.contents.generate)

    def _train(self) -> None:
        if Party.CRITIC in self.contents.train:
            self._note(Column.TRAIN, self.contents.train[Party.CRITIC])
            self._run(Column.WAKE, plan(Phase.AFTER_CRITIC, self._policy))
        self._note(Column.TRAIN, self.contents.train.get(Party.ACTOR, {}))
        self._note(Column.SAVE)

    def _begin(self, party: Party) -> None:
        for (owner, region), place in start(self._policy).items():
            if owner is party and (owner, region) in self.contents.regions:
                self._places[owner, region] = place

    def _run(self, column: Column, steps: Iterable[Step]) -> None:
        """Make the moves of parties that are on this GPU. A group of moves gives its host memory back at its end.

        What leaves makes no new height, and what comes after the weights are sent is the engine's as it generates.
        """
        returned: list[tuple[Party, Region]] = []
        sent = False
        for step in steps:
            if isinstance(step, Sync):
                sent = True
                self._note(column, self.contents.sync)
            elif isinstance(step, Move) and (step.party, step.region) in self._places:
                self._move(column, step, returned)
                if not (step.leaves or sent):
                    self._note(column)
            self._note_buffers(column)
        if not self.config.offload_train_keep_host_buffers:
            self._buffers -= set(returned)

    def _move(self, column: Column, move: Move, returned: list[tuple[Party, Region]]) -> None:
        key = (move.party, move.region)
        assert self._places[key] is move.source, (key, move, self._places[key])
        size = sum(self.contents.regions[key].values())
        if move.target is Place.HOST:
            self._buffers.add(key)
        elif move.target is Place.DISK:
            self._files.add(key)
        elif move.source is Place.HOST:
            returned.append(key)
        if Place.DROPPED not in (move.source, move.target):
            self.copied["out" if move.leaves else "in"] += int(size)
        self._places[key] = move.target

    def _note(self, column: Column, extra: Bytes | None = None) -> None:
        held: Counter[Item] = Counter(extra or {})
        for party in {party for party, _ in self._places}:
            held.update(self.contents.always[party])
        for key, place in self._places.items():
            if place is Place.GPU:
                held.update(self.contents.regions[key])
        if sum(held.values()) >= sum(self.gpu.get(column, {}).values()):
            self.gpu[column] = dict(held)
        self._note_buffers(column)

    def _note_buffers(self, column: Column) -> None:
        self.pinned[column] = max(self.pinned.get(column, 0.0), self._size(self._buffers))
        self.disk = max(self.disk, self._size(self._files))

    def _size(self, keys: set[tuple[Party, Region]]) -> float:
        return sum(sum(self.contents.regions[key].values()) for key in keys)
