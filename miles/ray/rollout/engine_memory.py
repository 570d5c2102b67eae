"""What of the engines' memory is on their GPUs, and the calls that change it.

SGLang ends its process on a release while a request runs, and on the return of what is not away. The records here
decide before any call goes out: what is where it shall be needs no call, and what can't be known raises.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from miles.engines.client import SGLangClient, SGLangError
from miles.residency.plan import ENGINE_REGIONS, Move, Party, Place, Region
from miles.residency.state import RegionTable, ResidencyError, State
from miles.utils.errors import UserError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
ABORT_SECONDS = 30.0
# Keys of SGLang's memory_usage, in GB of 2**30 bytes, of one of the engine's GPUs.
USAGE_KEYS = {Region.WEIGHTS: "weight", Region.KV_CACHE: "kvcache", Region.CUDA_GRAPH: "graph"}
GB = 2**30


class EngineMemory:
    """The memory of one engine. The caller sees to it that its calls don't overlap.

    Args:
        name: the engine in messages.
        client: its server, started with the memory saver.
    """

    def __init__(self, name: str, client: SGLangClient) -> None:
        self.name = name
        self._client = client
        self._table = RegionTable({(Party.ENGINE, region): Place.GPU for region in ENGINE_REGIONS})
        self._bytes = dict.fromkeys(ENGINE_REGIONS, 0)
        self._lost_version: str | None = None

    async def measure(self) -> None:
        """Ask the server how much memory each region has; call it once, before the first release."""
        info = await self._client.server_info()
        states = info["internal_states"]
        for region, key in USAGE_KEYS.items():
            of_one_gpu = sum(state["memory_usage"][key] for state in states) / len(states)
            self._bytes[region] = round(of_one_gpu * GB) * info["tp_size"]

    async def release(self, regions: Collection[Region]) -> int:
        """Give the memory of `regions` back, its contents are lost; returns how many bytes. What is away stays away.

        Waits for running requests first, then aborts them.

        Raises:
            ResidencyError: requests still run, the call failed (the regions are broken from then on: SGLang does what
                it is asked or dies), or a region is broken.
            SGLangError: the server failed before the release.
        """
        moves = self._moves(regions, Place.GPU, Place.DROPPED)
        if not moves:
            return 0
        await self._finish_requests()
        if any(move.region == Region.WEIGHTS for move in moves):
            self._lost_version = await self._version()
        return await self._run(moves, "release", self._client.release_memory_occupation)

    async def resume(self, regions: Collection[Region]) -> int:
        """Take the memory of `regions` again, for new contents; returns how many bytes. What is there stays.

        Raises:
            ResidencyError: the call failed (the regions are broken from then on), or a region is broken.
        """
        moves = self._moves(regions, Place.DROPPED, Place.GPU)
        if not moves:
            return 0
        return await self._run(moves, "return", self._client.resume_memory_occupation)

    async def missing(self) -> list[str]:
        """What the engine lacks to generate; nothing if it can.

        Weights that were released are missing until an update has changed the version that the server reports.
        """
        states = {region: self._table.place(Party.ENGINE, region) for region in ENGINE_REGIONS}
        problems = [f"{region} is {state}" for region, state in states.items() if state != State.GPU]
        if not problems and self._lost_version is not None:
            if await self._version() == self._lost_version:
                return [f"weights were released at version {self._lost_version} and not updated since"]
            self._lost_version = None
        return problems

    def _moves(self, regions: Collection[Region], source: Place, target: Place) -> list[Move]:
        """What has to move, in the order of ENGINE_REGIONS."""
        chosen = [region for region in ENGINE_REGIONS if region in regions]
        for region in chosen:
            self._table.require(Party.ENGINE, region, f"moving {', '.join(chosen)} of {self.name} to {target}")
        return [
            Move(Party.ENGINE, region, source, target)
            for region in chosen
            if self._table.place(Party.ENGINE, region) == source
        ]

    async def _run(self, moves: list[Move], what: str, call: Callable[[list[str]], Awaitable[None]]) -> int:
        tags = [str(move.region) for move in moves]
        for move in moves:
            self._table.begin(move, f"the {what} on {self.name}")
        try:
            await call(tags)
        except SGLangError as error:
            self._lose(moves, error)
            message = (
                f"{self.name}: whether {', '.join(tags)} moved from {moves[0].source} to {moves[0].target} is unknown: "
                f"{error}"
            )
            if moves[0].target == Place.GPU:
                # SGLang has no figures exact enough to compare with what is free before the call.
                size = sum(self._bytes[move.region] for move in moves) / 1e9
                message += (
                    f". {size:.2f} GB were to come back, and SGLang ends where there is no room: if its log says so, "
                    "lower --sglang-mem-fraction-static"
                )
            raise ResidencyError(message) from error
        except asyncio.CancelledError as error:
            self._lose(moves, error)
            raise
        for move in moves:
            self._table.finish(move)
        return sum(self._bytes[move.region] for move in moves)

    def _lose(self, moves: list[Move], cause: BaseException) -> None:
        for move in moves:
            self._table.fail(move, None, cause)

    async def _finish_requests(self) -> None:
        """Wait until no request runs, or abort those that do; then drop the prefix cache."""
        if self._table.place(Party.ENGINE, Region.KV_CACHE) != State.GPU:
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
        movable: the regions that may leave; others never move, whatever is asked.
        check_engines: called after a failure; raises, with the reason, if it was that a server has ended.
        before_release: awaited when the engines are in use no more and memory is about to leave.
    """

    def __init__(
        self,
        engines: Sequence[EngineMemory],
        movable: Collection[Region],
        check_engines: Callable[[], Awaitable[None]],
        before_release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._engines = engines
        self._movable = movable
        self._check_engines = check_engines
        self._before_release = before_release
        self._lock = asyncio.Lock()
        self._users: list[str] = []
        self._unused = asyncio.Event()
        self._unused.set()

    async def measure(self) -> None:
        """Ask all engines for the sizes of their regions, if any may move."""
        if self._movable:
            await self._of_all(EngineMemory.measure)

    async def offload(self, tags: Sequence[str]) -> dict[str, float]:
        """Release those of `tags` that may move, on all engines; returns perf/offload_rollout_* metrics.

        Raises:
            ValueError: a tag is unknown.
            ResidencyError: a rollout or an evaluation is running, or an engine failed. The others are awaited.
        """
        return await self._all("offload", tags, EngineMemory.release)

    async def onload(self, tags: Sequence[str]) -> dict[str, float]:
        """Take back those of `tags` that may move, on all engines; returns perf/onload_rollout_* metrics.

        Raises:
            ValueError: a tag is unknown.
            ResidencyError: a rollout or an evaluation is running, or an engine failed. The others are awaited.
        """
        return await self._all("onload", tags, EngineMemory.resume)

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

    async def _all(
        self, verb: str, tags: Sequence[str], move: Callable[[EngineMemory, Collection[Region]], Awaitable[int]]
    ) -> dict[str, float]:
        if unknown := [tag for tag in tags if tag not in ENGINE_REGIONS]:
            raise UserError(f"{verb}: {', '.join(unknown)}: no such tag; there are {', '.join(ENGINE_REGIONS)}")
        regions = [Region(tag) for tag in tags if tag in self._movable]
        start = time.perf_counter()
        async with self._lock:
            if regions:
                await self._wait_until_unused(verb)
                if move is EngineMemory.release and self._before_release is not None:
                    await self._before_release()
            results = await self._of_all(lambda engine: move(engine, regions))
        return {
            f"perf/{verb}_rollout_time": time.perf_counter() - start,
            f"perf/{verb}_rollout_bytes": float(sum(results)),
        }

    async def _of_all[T](self, call: Callable[[EngineMemory], Awaitable[T]]) -> list[T]:
        """The results of a call to each engine, side by side; all are awaited before a failure is raised."""
        results = await asyncio.gather(*map(call, self._engines), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if not failures:
            return results
        for failure in failures[1:]:
            failures[0].add_note(f"also failed: {failure}")
        try:
            raise failures[0]
        finally:
            await self._check_engines()  # the end of a server says more than a lost connection

    async def _wait_until_unused(self, verb: str) -> None:
        try:
            await asyncio.wait_for(self._unused.wait(), IDLE_SECONDS)
        except TimeoutError as error:
            raise ResidencyError(f"{verb}: the engines are still in use: {', '.join(self._users)}") from error
