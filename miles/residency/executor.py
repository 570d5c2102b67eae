"""The executor: runs the plan of a phase as calls to the trainer and the engines, and keeps track of every region."""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.residency.plan import (
    Clear,
    Move,
    Party,
    Phase,
    Place,
    Policy,
    Region,
    Step,
    Sync,
    needs,
    plan,
    start,
    trainer_leaves,
    trainer_returns,
)
from miles.residency.state import RegionTable, ResidencyError

POOLS = frozenset((Region.KV_CACHE, Region.CUDA_GRAPH))


@dataclass
class _Progress:
    """How far a phase has come."""

    phase: Phase
    call: int = 0  # the number of the one that is being made or has failed
    metrics: Counter[str] = field(default_factory=Counter)  # sums of those that were made


class Executor:
    """Runs phases, one at a time.

    A call that raises leaves its regions `moving`. The verbs are idempotent, so the phase may be run again: it goes on
    with the call that failed. Any other phase that touches those regions is refused.

    Args:
        policy: a legal policy.
        services: who carries out a party's moves: client of the RolloutManager, TrainGroup. Every method of theirs
            that is called is awaited and returns metrics. A trainer may be added once it is built.
        sync: sends the actor's weights to the engines and returns metrics.
    """

    def __init__(
        self,
        policy: Policy,
        services: dict[Party, Any],
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
        calls = _calls(plan(phase, self.policy))
        progress = self._progress
        if progress is None or progress.phase != phase:
            self._check_sources(calls, phase)
            progress = _Progress(phase)
        for steps in calls[progress.call :]:
            self._progress = progress
            progress.metrics.update(await self._call(steps, phase))
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

    def _check_sources(self, calls: Sequence[Sequence[Step]], phase: Phase) -> None:
        """Raise unless each region is where its first move expects it, and at rest if the sync reads it."""
        expected: dict[tuple[Party, Region], frozenset[Place]] = {}
        for step in itertools.chain.from_iterable(calls):
            if isinstance(step, Move):
                expected.setdefault((step.party, step.region), frozenset({step.source}))
            elif isinstance(step, Sync):
                for region in (Region.WEIGHTS, Region.OPTIMIZER):
                    expected.setdefault((Party.ACTOR, region), frozenset(Place))
        for key, places in expected.items():
            self.table.require(*key, f"phase {phase}", places)

    async def _call(self, steps: Sequence[Step], phase: Phase) -> dict[str, float]:
        match steps[0]:
            case Clear(party):
                return await self.services[party].clear_memory()
            case Sync():
                return await self._sync(phase)
            case Move():
                return await self._move(steps, phase)

    async def _move(self, moves: Sequence[Move], phase: Phase) -> dict[str, float]:
        service = self.services[moves[0].party]
        verb, *arguments = self._verb(moves)
        for move in moves:
            self.table.begin(move, f"{verb}() in phase {phase}")
            if (move.party, move.region) == (Party.ENGINE, Region.WEIGHTS):
                self._unreadable = "no weight sync has written it since it left"
        try:
            metrics = await getattr(service, verb)(*arguments)
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

    def _verb(self, moves: Sequence[Move]) -> tuple[str, ...] | tuple[str, list[str]]:
        """The method that does exactly these moves, and its arguments."""
        party, leaves = moves[0].party, moves[0].leaves
        regions = {move.region for move in moves}
        if party == Party.ENGINE:
            pools = POOLS & {Region.CUDA_GRAPH, *self.policy.levels}
            if regions == {Region.WEIGHTS}:
                return ("offload_weights" if leaves else "onload_weights",)
            if regions <= POOLS:
                assert regions == pools, f"offload_kv and onload_kv move {pools}, not {regions}"
                return ("offload_kv" if leaves else "onload_kv",)
            return ("offload" if leaves else "onload", [str(move.region) for move in moves])
        if regions == {Region.COMM}:
            return ("destroy_process_groups" if leaves else "reload_process_groups",)
        if leaves and regions == {Region.GRADS}:
            return ("offload_grad_buffer",)
        verb, whole = ("sleep", trainer_leaves) if leaves else ("onload", trainer_returns)
        not_there = {
            move.region for move in whole(party, self.policy) if self.table.place(party, move.region) != move.target
        }
        assert regions == not_there, f"{verb} moves {not_there}, not {regions}"
        return (verb,)


def _calls(steps: Sequence[Step]) -> list[list[Step]]:
    """Consecutive moves of one party in one direction are one call."""

    def key(step: Step) -> tuple:
        return (type(step), step.party, step.leaves) if isinstance(step, Move) else (step,)

    return [list(group) for _, group in itertools.groupby(steps, key)]
