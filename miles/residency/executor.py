"""The executor: runs the plan of a phase as calls to the trainer and the engines, and keeps track of every region."""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miles.residency.plan import Clear, Move, Party, Phase, Place, Policy, Region, Step, Sync, needs, plan, start
from miles.residency.state import RegionTable, ResidencyError

# One call of the driver: consecutive moves of one party in one direction go together.
Call = Clear | Sync | tuple[Move, ...]


class Service(Protocol):
    """Who owns a party's memory: client of the RolloutManager, TrainGroup."""

    async def move(self, moves: Sequence[Move]) -> dict[str, float]:
        """Make `moves` of one direction, in order, but for those that are made already; returns perf metrics."""

    async def clear_memory(self) -> dict[str, float]:
        """Empty the allocators' caches; returns perf metrics. Asked of trainers alone."""


@dataclass
class _Progress:
    """How far a phase has come."""

    phase: Phase
    call: int = 0  # the number of the one that is being made or has failed
    metrics: Counter[str] = field(default_factory=Counter)  # sums of those that were made


class Executor:
    """Runs phases, one at a time.

    Moves go to their party as they were planned. A call that raises leaves its regions `moving`. Who has made a move
    makes it no second time, so the phase may be run again: it goes on with the call that failed. Any other phase that
    touches those regions is refused.

    Args:
        policy: a legal policy.
        services: who makes a party's moves. A trainer may be added once it is built.
        sync: sends the actor's weights to the engines and returns metrics.
    """

    def __init__(
        self,
        policy: Policy,
        services: dict[Party, Service],
        sync: Callable[[], Awaitable[dict[str, float]]],
    ):
        self.policy = policy
        self.services = services
        self.sync = sync
        self.table = RegionTable(start(policy))
        # Why nobody may generate with the engines' weights. They start with those of a checkpoint.
        self._unreadable: str | None = None
        # Of the phase that is running or has failed.
        self._progress: _Progress | None = None

    async def run(self, phase: Phase) -> dict[str, float]:
        """Do what is planned at `phase` and check that what is needed after it is there.

        Returns: the sums of the metrics of all calls, with those that were made before a failure.

        Raises:
            ResidencyError: a region is not where the plan expects it; names party, region, state and this phase. Then
                nothing was called.
            Exception: what a call raised. Its regions are left `moving`, see above.
        """
        steps = plan(phase, self.policy)
        calls = _calls(steps)
        progress = self._progress
        if progress is None or progress.phase != phase:
            self._check_sources(steps, phase)
            progress = _Progress(phase)
        for call in calls[progress.call :]:
            self._progress = progress
            progress.metrics.update(await self._make(call, phase))
            progress.call += 1
        if calls:
            self._progress = None
        self.check(phase)
        return dict(progress.metrics)

    def check(self, phase: Phase) -> None:
        """Raise unless what is needed after `phase` is on the GPU and readable.

        Raises:
            ResidencyError: names party, region, state and phase.
        """
        for party, region in sorted(needs(phase, self.policy)):
            self.table.require(party, region, f"phase {phase}", frozenset({Place.GPU}))
            if (party, region) == (Party.ENGINE, Region.WEIGHTS) and self._unreadable is not None:
                raise ResidencyError(f"{party} {region} is on the gpu, but {self._unreadable}: phase {phase} needs it")

    def _check_sources(self, steps: Sequence[Step], phase: Phase) -> None:
        """Raise unless each region is where its first move expects it, and at rest if the sync reads it."""
        expected: dict[tuple[Party, Region], frozenset[Place]] = {}
        for step in steps:
            if isinstance(step, Move):
                expected.setdefault((step.party, step.region), frozenset({step.source}))
            elif isinstance(step, Sync):
                for region in (Region.WEIGHTS, Region.OPTIMIZER):
                    expected.setdefault((Party.ACTOR, region), frozenset(Place))
        for key, places in expected.items():
            self.table.require(*key, f"phase {phase}", places)

    async def _make(self, call: Call, phase: Phase) -> dict[str, float]:
        match call:
            case Clear(party):
                return await self.services[party].clear_memory()
            case Sync():
                return await self._sync(phase)
            case moves:
                return await self._move(moves, phase)

    async def _move(self, moves: Sequence[Move], phase: Phase) -> dict[str, float]:
        for move in moves:
            self.table.begin(move, f"phase {phase}")
            if (move.party, move.region) == (Party.ENGINE, Region.WEIGHTS):
                self._unreadable = "no weight sync has written it since it left"
        try:
            metrics = await self.services[moves[0].party].move(moves)
        except Exception as error:
            for move in moves:
                self.table.interrupt(move, error)
            raise
        for move in moves:
            self.table.finish(move)
        return metrics

    async def _sync(self, phase: Phase) -> dict[str, float]:
        caller = f"the weight sync in phase {phase}"
        self.table.require(Party.ENGINE, Region.WEIGHTS, caller, frozenset({Place.GPU}))
        if self.policy.sync_gathers:
            self.table.require(Party.ACTOR, Region.COMM, caller, frozenset({Place.GPU}))
        self._unreadable = f"{caller} has not ended"
        try:
            metrics = await self.sync()
        except Exception as error:
            self._unreadable = f"{caller} failed: {type(error).__name__}: {error}"
            raise
        self._unreadable = None
        return metrics


def _calls(steps: Sequence[Step]) -> list[Call]:
    def key(step: Step) -> tuple:
        return (step.party, step.leaves) if isinstance(step, Move) else (step,)

    calls: list[Call] = []
    for _, group in itertools.groupby(steps, key):
        first, *others = group
        calls += [(first, *others)] if isinstance(first, Move) else [first, *others]
    return calls
