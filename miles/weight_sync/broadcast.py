"""To remote engines through a process group a pipeline stage: NCCL between GPUs, gloo on a CPU."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from miles.engines.client import SGLangError
from miles.utils.network import free_ports
from miles.utils.tasks import all_of
from miles.weight_sync.plan import Bucket
from miles.weight_sync.session import delivery
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.transport import Link, Transport, TransportSetup

logger = logging.getLogger(__name__)

# That engines have, after a failed update, to take what is on its way, and then to leave the group. Both together are
# less than what a rank has, once another has failed.
LEAVING_SECONDS = 5.0


class BroadcastTransport(Transport):
    """One group for each pipeline stage: a rank of it, the source, and all ranks of all engines; see `Transport`.

    Groups are made by the first update and kept; after a failure the engines leave them, and they are made anew. A
    broadcast that is stuck fails after the timeout.
    """

    everywhere = False

    def __init__(self, engines: dict[int, EngineTarget], setup: TransportSetup):
        super().__init__(engines, setup)
        self.sources, self.device = setup.stage_sources, setup.device
        self.address, self.timeout = setup.address, setup.timeout
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._taking: Future | None = None

    def begin(self, link: Link) -> None:
        self._link = link
        if self.rank in self.sources and self._group is None:
            self._group = link.loop.run([self._connect()])[0]

    async def _connect(self) -> dist.ProcessGroup:
        (port,) = free_ports(1, self.address)
        # Of this address alone: a store opens its port on all of the machine's.
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.create_server((self.address, port), family=family)
        self._name = f"miles-pp_{self.sources.index(self.rank)}-{port}"
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        world_size = 1 + sum(engine.tp_size for engine in self.engines.values())
        calls, offset = [], 1
        for number, engine in self.engines.items():
            calls.append(
                self._link.clients[number].init_weights_update_group(
                    master_address=self.address,
                    master_port=port,
                    rank_offset=offset,
                    world_size=world_size,
                    group_name=self._name,
                    backend=backend,
                )
            )
            offset += engine.tp_size
        made = _in_thread(lambda: self._make_group(listener, port, world_size, backend))
        await all_of([made, *calls])
        return made.result()

    def _make_group(self, listener: socket.socket, port: int, world_size: int, backend: str) -> dist.ProcessGroup:
        from sglang.srt.utils import init_custom_process_group

        # Without waiting for the workers: they are waited for when the group is made.
        store = dist.TCPStore(
            self.address,
            port,
            world_size,
            True,
            self.timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return init_custom_process_group(
            backend=backend,
            store=dist.PrefixStore(self._name, store),  # as SGLang's own call prefixes it
            timeout=self.timeout,
            world_size=world_size,
            rank=0,
            group_name=self._name,
        )

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self.sources[bucket.stage] == self.rank:
            ready = None
            if self.device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record()
            self._taking = self._link.loop.start(self._deliver(bucket, flat, ready))

    async def _deliver(self, bucket: Bucket, flat: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        names = list(bucket.slots)
        dtypes = [str(slot.dtype).removeprefix("torch.") for slot in bucket.slots.values()]
        shapes = [slot.shape for slot in bucket.slots.values()]
        calls = []
        for number, engine in self.engines.items():
            client = self._link.clients[number]
            taking = client.update_weights_from_distributed(names, dtypes, shapes, group_name=self._name)
            calls.append(delivery(engine.url, names, taking))
        await all_of([_in_thread(lambda: self._broadcast(flat, ready)), *calls])

    def _broadcast(self, flat: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is None:
            dist.broadcast(flat, group=self._group, group_src=0)
            return
        # On a stream of its own: the next bucket is gathered on the usual one meanwhile.
        stream, done = torch.cuda.Stream(self.device), torch.cuda.Event()
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            dist.broadcast(flat, group=self._group, group_src=0)
            done.record()
        done.synchronize()

    def wait(self) -> None:
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.result()

    def end(self) -> None:
        assert self._taking is None

    def abandon(self) -> None:
        taking, self._taking = self._taking, None
        if taking is not None:
            with contextlib.suppress(Exception):  # the update's own failure is being raised
                taking.result(LEAVING_SECONDS)
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            # A broadcast that an engine did not join would hold the GPU for good.
            group.abort()
        name, self._name = self._name, ""
        if name:
            self._link.loop.run(self._leave(number, name) for number in self.engines)

    async def _leave(self, number: int, name: str) -> None:
        """Have an engine leave the group `name`, which it may not have joined, or be stuck in."""
        try:
            async with asyncio.timeout(LEAVING_SECONDS):
                await self._link.clients[number].destroy_weights_update_group(name)
        except (SGLangError, TimeoutError) as error:
            logger.warning("%s may be in process group %s still: %s", self.engines[number].url, name, error)

    def close(self, link: Link) -> None:
        if self._group is not None:
            link.loop.run([self._disconnect(link)])

    async def _disconnect(self, link: Link) -> None:
        group, self._group = self._group, None
        leaving = [link.clients[number].destroy_weights_update_group(self._name) for number in self.engines]
        await all_of([_in_thread(lambda: dist.destroy_process_group(group)), *leaving])


def _in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """The result of `function`, which blocks. Nothing waits for the thread: a stuck one does not hold the process."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def run() -> None:
        try:
            value, error = function(), None
        except Exception as failure:
            value, error = None, failure
        with contextlib.suppress(RuntimeError):  # the update has failed elsewhere, and its loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    def settle(value: Any, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
