"""What of the engines' memory is on their GPUs, and the calls that change it.

SGLang ends its process on a release while a request runs, and on the return of what is not away. The records here
decide before any call goes out: what is where it shall be needs no call, and what can't be known raises.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from miles.engines.client import SGLangClient, SGLangError
from miles.residency.plan import ENGINE_REGIONS, Move, Place, Region
from miles.residency.state import ResidencyError
from miles.utils.tasks import all_to_their_end
from miles.utils.units import GB, GIB

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
ABORT_SECONDS = 30.0
# Keys of SGLang's memory_usage, in units of 2**30 bytes, of one of the engine's GPUs.
USAGE_KEYS = {Region.WEIGHTS: "weight", Region.KV_CACHE: "kvcache", Region.CUDA_GRAPH: "graph"}


class EngineMemory:
    """The memory of one engine. The caller sees to it that its calls don't overlap.

    Args:
        name: the engine in messages.
        client: its server, started with the memory saver.
    """

    def __init__(self, name: str, client: SGLangClient) -> None:
        self.name = name
        self._client = client
        self._places = dict.fromkeys(ENGINE_REGIONS, Place.GPU)
        # What a call failed with that moved them: nobody knows where they are.
        self._broken: dict[Region, BaseException] = {}
        self._bytes = dict.fromkeys(ENGINE_REGIONS, 0)
        self._lost_version: str | None = None

    async def measure(self) -> None:
        """Ask the server how much memory each region has; call it once, before the first release."""
        info = await self._client.server_info()
        states = info["internal_states"]
        for region, key in USAGE_KEYS.items():
            of_one_gpu = sum(state["memory_usage"][key] for state in states) / len(states)
            self._bytes[region] = round(of_one_gpu * GIB) * info["tp_size"]

    async def move(self, moves: Sequence[Move]) -> int:
        """Make `moves`, all in one direction, but for those that are made already; returns how many bytes moved.

        What leaves loses its contents; before it, running requests are waited for, then aborted. What returns is for
        new contents.

        Raises:
            ResidencyError: requests still run, the call failed (the regions are broken from then on: SGLang does what
                it is asked or dies), or a region is broken.
            SGLangError: the server failed before the release.
        """
        for move in moves:
            if (cause := self._broken.get(move.region)) is not None:
                raise ResidencyError(
                    f"{self.name}: {move.region} is broken: its last move failed: {type(cause).__name__}: {cause}"
                ) from cause
        pending = [move for move in moves if self._places[move.region] is not move.target]
        if not pending:
            return 0
        if not pending[0].leaves:
            return await self._run(pending, self._client.resume_memory_occupation)
        await self._finish_requests()
        if any(move.region is Region.WEIGHTS for move in pending):
            self._lost_version = await self._version()
        return await self._run(pending, self._client.release_memory_occupation)

    async def missing(self) -> list[str]:
        """What the engine lacks to generate; nothing if it can.

        Weights that were released are missing until an update has changed the version that the server reports.
        """
        problems = [f"{region} is broken" for region in self._broken]
        problems += [
            f"{region} is {place}"
            for region, place in self._places.items()
            if place is not Place.GPU and region not in self._broken
        ]
        if not problems and self._lost_version is not None:
            if await self._version() == self._lost_version:
                return [f"weights were released at version {self._lost_version} and not updated since"]
            self._lost_version = None
        return problems

    async def _run(self, moves: list[Move], call: Callable[[list[str]], Awaitable[None]]) -> int:
        tags = [str(move.region) for move in moves]
        try:
            await call(tags)
        except SGLangError as error:
            self._broken |= {move.region: error for move in moves}
            message = (
                f"{self.name}: whether {', '.join(tags)} moved from {moves[0].source} to {moves[0].target} is unknown: "
                f"{error}"
            )
            if not moves[0].leaves:
                # SGLang has no figures exact enough to compare with what is free before the call.
                size = sum(self._bytes[move.region] for move in moves) / GB
                message += (
                    f". {size:.2f} GB were to come back, and SGLang ends where there is no room: if its log says so, "
                    "lower --sglang-mem-fraction-static"
                )
            raise ResidencyError(message) from error
        except asyncio.CancelledError as error:
            self._broken |= {move.region: error for move in moves}
            raise
        self._places |= {move.region: move.target for move in moves}
        return sum(self._bytes[move.region] for move in moves)

    async def _finish_requests(self) -> None:
        """Wait until no request runs, or abort those that do; then drop the prefix cache."""
        if self._places[Region.KV_CACHE] is not Place.GPU:
            return  # Nothing can run, and a flush would touch memory that is away.
        if await self._flush(IDLE_SECONDS):
            return
        running = await self._client.running_requests()
        logger.warning("%s: aborting %d requests that still run after %g s", self.name, running, IDLE_SECONDS)
        await self._client.abort()
        if not await self._flush(ABORT_SECONDS):
            running = await self._client.running_requests()
            raise ResidencyError(
                f"{self.name}: its memory can't be released: {running} requests still run {ABORT_SECONDS:g} s after "
                "they were aborted"
            )

    async def _flush(self, timeout: float) -> bool:
        try:
            await self._client.flush_cache(timeout)
        except SGLangError as error:
            if error.status != 400:
                raise
            return False
        return True

    async def _version(self) -> str:
        return (await self._client.model_info())["weight_version"]


class RolloutMemory:
    """The memory of all engines of a run: moves what may move, one call at a time, and never under a running rollout.

    Args:
        engines: the engines.
        check_engines: called after a failure; raises, with the reason, if it was that a server has ended.
        before_release: awaited when the engines are in use no more and memory is about to leave.
    """

    def __init__(
        self,
        engines: Sequence[EngineMemory],
        check_engines: Callable[[], Awaitable[None]],
        before_release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._engines = engines
        self._check_engines = check_engines
        self._before_release = before_release
        self._lock = asyncio.Lock()
        self._users: list[str] = []
        self._unused = asyncio.Event()
        self._unused.set()

    async def measure(self) -> None:
        """Ask all engines for the sizes of their regions."""
        await self._of_all(EngineMemory.measure)

    async def move(self, moves: Sequence[Move]) -> dict[str, float]:
        """Make `moves`, all in one direction, on all engines, but for those that are made already.

        Returns:
            Metrics: seconds, and bytes of all engines (perf/offload_rollout_*, perf/onload_rollout_*); {} without any.

        Raises:
            ResidencyError: a rollout or an evaluation is running, or an engine failed. The others are awaited.
        """
        if not moves:
            return {}
        leave, start = moves[0].leaves, time.perf_counter()
        verb = "offload" if leave else "onload"
        async with self._lock:
            await self._wait_until_unused(verb)
            if leave and self._before_release is not None:
                await self._before_release()
            results = await self._of_all(lambda engine: engine.move(moves))
        return {
            f"perf/{verb}_rollout_time": time.perf_counter() - start,
            f"perf/{verb}_rollout_bytes": float(sum(results)),
        }

    @asynccontextmanager
    async def in_use(self, purpose: str) -> AsyncIterator[None]:
        """While the context is open the engines generate for `purpose`, and no memory moves.

        Raises:
            ResidencyError: an engine's memory is away or moving, or its weights are not those of the last sync.
        """
        self._users.append(purpose)
        self._unused.clear()
        try:
            if self._lock.locked():
                raise ResidencyError(f"{purpose} needs the engines, whose memory is being moved")
            lacking = await self._of_all(EngineMemory.missing)
            problems = [
                f"{engine.name}: {', '.join(missing)}"
                for engine, missing in zip(self._engines, lacking, strict=True)
                if missing
            ]
            if problems:
                raise ResidencyError(f"{purpose} needs all of the engines' memory: {'; '.join(problems)}")
            yield
        finally:
            self._users.remove(purpose)
            if not self._users:
                self._unused.set()

    async def _of_all[T](self, call: Callable[[EngineMemory], Awaitable[T]]) -> list[T]:
        """The results of a call to each engine, side by side; all are awaited before a failure is raised."""
        try:
            return await all_to_their_end([call(engine) for engine in self._engines])
        except Exception:
            await self._check_engines()  # the end of a server says more than a lost connection
            raise

    async def _wait_until_unused(self, verb: str) -> None:
        try:
            await asyncio.wait_for(self._unused.wait(), IDLE_SECONDS)
        except TimeoutError as error:
            raise ResidencyError(f"{verb}: the engines are still in use: {', '.join(self._users)}") from error
