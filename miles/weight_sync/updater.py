"""Brings the trainer's weights into the engines, in lockstep on all trainer ranks."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from miles.engines.client import SGLangClient
from miles.utils.agreement import Agreement
from miles.utils.stopwatch import Stopwatch
from miles.weight_sync.background import BackgroundLoop
from miles.weight_sync.bucket import empty_bucket
from miles.weight_sync.check import SentHashes, compare
from miles.weight_sync.format import CheckpointFormat, EngineFormat
from miles.weight_sync.gather import Gatherer
from miles.weight_sync.local import LocalTransport
from miles.weight_sync.plan import Bucket
from miles.weight_sync.session import UpdateSession
from miles.weight_sync.source import WeightSource
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.transport import Link, Transport, TransportSetup
from miles.weight_sync.transports import REMOTE_TRANSPORTS


@dataclass(frozen=True)
class TrainerRank:
    """A rank among those that send together.

    Args:
        rank: this process in the trainer's world.
        agreement: of all trainer ranks.
        address: of this rank's machine, as remote engines reach it.
        timeout: after which ranks that wait for another fail.
    """

    rank: int
    agreement: Agreement
    address: str
    timeout: timedelta


@dataclass(frozen=True)
class SyncSettings:
    """How weights are sent.

    Args:
        checkpoint_folder: where the engines loaded their weights from.
        buffer_size: bytes of one bucket (--update-weight-buffer-size). A trainer rank holds two at a time: one that
            engines are taking, one that is being gathered.
        flush_cache: empty the caches of colocated engines before the first bucket; False where their memory is away
            during an update, in which case they were emptied before. Others' always are.
        pause_mode: --pause-generation-mode.
        transfer_mode: --update-weight-transfer-mode, of `REMOTE_TRANSPORTS`.
        disk_folder: --update-weight-disk-dir.
        check_equal: --check-weight-update-equal.
    """

    checkpoint_folder: str | Path
    buffer_size: int
    flush_cache: bool
    pause_mode: str
    transfer_mode: str
    disk_folder: str | None
    check_equal: bool


class WeightUpdater:
    """Sends the weights of a source to engines.

    Build it on every trainer rank, after the process groups; all ranks call `update` together.

    Args:
        source: this rank's part of the weights.
        engines: all of them.
        trainer: this rank.
        settings: how they are sent.
        engine_format: what the engines hold; the checkpoint's tensors unless it is given.
    """

    def __init__(
        self,
        source: WeightSource,
        engines: list[EngineTarget],
        trainer: TrainerRank,
        settings: SyncSettings,
        engine_format: EngineFormat | None = None,
    ):
        self.source, self.engines, self.rank, self.agreement = source, engines, trainer.rank, trainer.agreement
        self.settings = settings
        # The other ranks wait meanwhile, up to the timeout: who waits for an engine has to say so before them.
        self.load_timeout = 0.9 * trainer.timeout.total_seconds()
        self.gatherer = Gatherer(source, engine_format or CheckpointFormat(), settings.buffer_size)
        setup = self._transport_setup(trainer)
        self.hashes = SentHashes(setup) if settings.check_equal else None
        local = {number: engine for number, engine in enumerate(engines) if engine.source_ranks is not None}
        remote = {number: engine for number, engine in enumerate(engines) if engine.source_ranks is None}
        self.transports: list[Transport] = []
        if local:
            self.transports.append(LocalTransport(local, setup))
        if remote:
            self.transports.append(REMOTE_TRANSPORTS[settings.transfer_mode].load()(remote, setup))

    def _transport_setup(self, trainer: TrainerRank) -> TransportSetup:
        stages = [0] * dist.get_world_size(self.agreement.group)
        dist.all_gather_object(stages, self.source.stage, group=self.agreement.group)
        return TransportSetup(
            rank=trainer.rank,
            stage_sources=[stages.index(stage) for stage in range(self.source.stages)],
            device=self.source.device,
            address=trainer.address,
            timeout=trainer.timeout,
            buffer_size=self.settings.buffer_size,
            checkpoint_folder=self.settings.checkpoint_folder,
            disk_folder=self.settings.disk_folder,
        )

    def update(self, version: int) -> dict[str, float]:
        """Send every weight and set the engines' version; returns metrics (`perf/update_weights_*`).

        Where one rank or engine failed all ranks raise (see `Agreement.check`), after engines that were sent nothing
        went on. Only what fails inside a gather is raised on its rank alone, and leaves the others there.
        """
        start = time.perf_counter()
        buckets = self.gatherer.buckets
        with BackgroundLoop() as loop:
            clients = [SGLangClient(engine.url, load_timeout=self.load_timeout) for engine in self.engines]
            link = Link(loop, dict(enumerate(clients)))
            sessions = {
                number: self._session(engine, link.clients[number], version)
                for number, engine in enumerate(self.engines)
                if engine.lead == self.rank
            }
            watch = Stopwatch()
            try:
                with watch("session"):
                    self._together(lambda: loop.run([session.open() for session in sessions.values()]))
                self._send_all(link, sessions, self.transports, watch)
                if self.hashes is not None:
                    self._check(link, list(sessions), self.hashes)
                with watch("session"):
                    self._together(lambda: _finish(loop, sessions.values(), buckets))
            finally:
                loop.run([session.release() for session in sessions.values()])
                loop.run([client.close() for client in link.clients.values()])
        # The engines take their memory back next: none of the buckets' may stay cached here.
        self._empty_cache()
        seconds, sent_bytes = time.perf_counter() - start, sum(bucket.nbytes for bucket in buckets)
        return {
            "perf/update_weights_time": seconds,
            "perf/update_weights_bytes": sent_bytes,
            "perf/update_weights_tensors": len(self._names()),
            "perf/update_weights_gb_per_s": sent_bytes / seconds / 1e9,
            "perf/update_weights_session_time": watch.seconds["session"],
            "perf/update_weights_wait_time": watch.seconds["wait"],
        }

    def close(self) -> None:
        """After the last update: the engines forget the groups that it was sent through. All ranks call it together.

        Where one rank or engine failed all ranks raise.
        """
        with BackgroundLoop() as loop:
            link = Link(loop, {number: SGLangClient(engine.url) for number, engine in enumerate(self.engines)})
            try:
                self._together(*(lambda t=transport: t.close(link) for transport in self.transports))
            finally:
                loop.run([client.close() for client in link.clients.values()])

    def _empty_cache(self) -> None:
        if self.source.device.type == "cuda":
            torch.cuda.empty_cache()

    def _session(self, engine: EngineTarget, client: SGLangClient, version: int) -> UpdateSession:
        flush_cache = self.settings.flush_cache or engine.source_ranks is None
        return UpdateSession(client, self._names(), version, flush_cache, self.settings.pause_mode)

    def _names(self) -> list[str]:
        """Of all tensors that an engine is sent."""
        return [name for bucket in self.gatherer.buckets for name in bucket.slots]

    def _send_all(
        self,
        link: Link,
        sessions: dict[int, UpdateSession],
        transports: list[Transport],
        watch: Stopwatch,
    ) -> None:
        """Every bucket through every transport; the next one is made while engines take the last.

        sessions: of the engines that this rank talks to, by number.
        """
        waits = [transport.wait for transport in transports]
        finished = False
        try:
            self._together(*(lambda t=transport: t.begin(link) for transport in transports))
            taken = 0  # bytes of the bucket that engines may still be reading
            flat = None
            for bucket in self.gatherer.buckets:
                if taken + bucket.capacity + bucket.scratch > 2 * self.settings.buffer_size:
                    # Too large to be made beside the last one, in whose place it would not fit.
                    with watch("wait"):
                        self._together(*waits)
                    flat = None
                    self._empty_cache()
                following = self._together(lambda bucket=bucket: self._room(transports, bucket))
                prepare = self._fill(transports, bucket, following)
                with watch("wait"):
                    self._together(*prepare, *waits)
                flat, taken = following, bucket.capacity
                del following, prepare
                self._touch(sessions, at_end=False)
                if flat is not None:
                    for transport in transports:
                        transport.send(bucket, flat)
            with watch("wait"):
                self._together(*waits)
            self._touch(sessions, at_end=True)
            self._together(*(transport.end for transport in transports))
            finished = True
        finally:
            if not finished:
                for transport in transports:
                    transport.abandon()

    def _touch(self, sessions: dict[int, UpdateSession], at_end: bool) -> None:
        """From here on the engines' weights may be of two versions."""
        for transport in self.transports:
            if transport.touches_at_end == at_end:
                for number in transport.engines.keys() & sessions.keys():
                    sessions[number].touched = True

    def _room(self, transports: list[Transport], bucket: Bucket) -> torch.Tensor | None:
        """Memory for the bucket, uint8 [bucket.nbytes]; None on a rank that has no part in it."""
        everywhere = any(transport.everywhere for transport in transports)
        if not everywhere and bucket.stage != self.source.stage:
            return None
        shared, device = any(transport.shares_memory for transport in transports), self.source.device
        flat = empty_bucket(bucket.capacity, device, shared)[: bucket.nbytes]
        # What gathering takes for a moment: where it is missing, that shows here, before the others wait in a gather.
        torch.empty(bucket.scratch, dtype=torch.uint8, device=device)
        return flat

    def _fill(self, transports: list[Transport], bucket: Bucket, flat: torch.Tensor | None) -> list[Callable[[], None]]:
        """Gather the bucket; returns what makes it ready to be sent, which may fail on this rank alone."""
        if flat is None:
            return []
        failure = self.gatherer.fill(bucket, flat, any(transport.everywhere for transport in transports))

        def prepare() -> None:
            if failure is not None:
                raise failure
            for transport in transports:
                transport.prepare(bucket, flat)

        return [prepare]

    def _check(self, link: Link, leads: list[int], hashes: SentHashes) -> None:
        """--check-weight-update-equal, at the first update: overwrite the engines' weights and send them once more."""
        first = self._together(lambda: link.loop.run([link.clients[number].weight_checksums() for number in leads]))
        self._together(lambda: link.loop.run([link.clients[number].reset_weights() for number in leads]))
        self._send_all(link, {}, [*self.transports, hashes], Stopwatch())
        self.hashes = None
        second = self._together(lambda: link.loop.run([link.clients[number].weight_checksums() for number in leads]))
        self._together(
            *(
                lambda n=number, a=a, b=b: compare(self.engines[n].url, a, b, hashes.hashes)
                for number, a, b in zip(leads, first, second, strict=True)
            )
        )

    def _together(self, *actions: Callable):
        """Run all of this rank's actions, and wait for all ranks' to end; returns the last one's result.

        Raises the first failure, on the other ranks too: see `Agreement.check`.
        """
        failure = result = None
        for action in actions:
            try:
                result = action()
            except Exception as error:
                failure = failure or error
        self.agreement.check("the weight update", failure)
        return result


def _finish(loop: BackgroundLoop, sessions: Collection[UpdateSession], buckets: list[Bucket]) -> None:
    for session in sessions:
        for bucket in buckets:
            session.sent(bucket.slots)
    loop.run([session.finish() for session in sessions])
