"""The executor: runs the plan of a phase as calls to the trainer and the engines, and keeps track of every region."""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    error: BaseException | None = None  # what the call has failed with


class Executor:
    """Runs phases, one at a time.

    Moves go to their party as they were planned. After a call that raises only the same phase may be run: it goes on
    with that call, of which a party makes no move twice. Every other phase is refused.

    Args:
        policy: a legal policy.
        services: who makes a party's moves.
        sync: sends the actor's weights to the engines and returns metrics.
    """

    def __init__(
        self,
        policy: Policy,
        services: Mapping[Party, Service],
        sync: Callable[[], Awaitable[dict[str, float]]],
    ):
        self.policy = policy
        self.services = services
        self.sync = sync
        self.table = RegionTable(start(policy))
        # Of the phase that is running or has failed.
        self._progress: _Progress | None = None

    async def run(self, phase: Phase) -> dict[str, float]:
        """Do what is planned at `phase` and check that what is needed after it is there.

        Returns: the sums of the metrics of all calls, with those that were made before a failure.

        Raises:
            ResidencyError: a region is not where the plan expects it, or another phase has failed. The message names
                this phase, and nothing was called.
            Exception: what a call raised.
        """
        steps = plan(phase, self.policy)
        self._check_unfinished(phase)
        if self._progress is None:
            self._check_sources(steps, phase)
            self._progress = _Progress(phase)
        progress = self._progress
        for call in _calls(steps)[progress.call :]:
            try:
                progress.metrics.update(await self._make(call, phase))
            except BaseException as error:
                progress.error = error
                raise
            progress.call += 1
        self._progress = None
        self.check(phase)
        return dict(progress.metrics)

    def check(self, phase: Phase) -> None:
        """Raise unless what is needed after `phase` is on the GPU.

        Raises:
            ResidencyError: names party, region, place and phase.
        """
        self._check_unfinished(phase)
        for party, region in sorted(needs(phase, self.policy)):
            self.table.require(party, region, Place.GPU, f"phase {phase}")

    def _check_unfinished(self, phase: Phase) -> None:
        progress = self._progress
        if progress is not None and progress.phase is not phase:
            cause = progress.error
            raise ResidencyError(
                f"phase {phase} can't come: phase {progress.phase} has not ended"
                + (f", which failed: {type(cause).__name__}: {cause}" if cause is not None else "")
            ) from cause

    def _check_sources(self, steps: Sequence[Step], phase: Phase) -> None:
        """Raise unless each region is where its first move expects it."""
        first: dict[tuple[Party, Region], Place] = {}
        for step in steps:
            if isinstance(step, Move):
                first.setdefault((step.party, step.region), step.source)
        for (party, region), place in first.items():
            self.table.require(party, region, place, f"phase {phase}")

    async def _make(self, call: Call, phase: Phase) -> dict[str, float]:
        match call:
            case Clear(party):
                return await self.services[party].clear_memory()
            case Sync():
                return await self._sync(phase)
            case moves:
                return await self._move(moves, phase)

    async def _move(self, moves: tuple[Move, ...], phase: Phase) -> dict[str, float]:
        for move in moves:
            self.table.begin(move, f"phase {phase}")
        metrics = await self.services[moves[0].party].move(moves)
        for move in moves:
            self.table.finish(move)
        return metrics

    async def _sync(self, phase: Phase) -> dict[str, float]:
        caller = f"the weight sync in phase {phase}"
        self.table.require(Party.ENGINE, Region.WEIGHTS, Place.GPU, caller)
        if self.policy.sync_gathers:
            self.table.require(Party.ACTOR, Region.COMM, Place.GPU, caller)
        return await self.sync()


def _calls(steps: Sequence[Step]) -> list[Call]:
    def key(step: Step) -> tuple:
        return (step.party, step.leaves) if isinstance(step, Move) else (step,)

    calls: list[Call] = []
    for _, group in itertools.groupby(steps, key):
        together = list(group)
        moves = tuple(step for step in together if isinstance(step, Move))
        calls += [moves] if moves else [step for step in together if not isinstance(step, Move)]
    return calls
