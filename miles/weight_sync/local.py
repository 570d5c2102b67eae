"""To engines on the trainer's own GPUs, or on its machine's CPU: they open the trainer's buckets, nothing is copied."""

from concurrent.futures import Future

import torch
import torch.distributed as dist

from miles.weight_sync.bucket import handle
from miles.weight_sync.plan import Bucket
from miles.weight_sync.session import delivery
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.transport import Link, Transport, TransportSetup


class LocalTransport(Transport):
    """CUDA IPC on a GPU, shared memory on a CPU; see `Transport`. Its engines all have source ranks."""

    everywhere = True

    def __init__(self, engines: dict[int, EngineTarget], setup: TransportSetup):
        super().__init__(engines, setup)
        # Of each engine, for each of its ranks the trainer rank that it reads.
        self._sources = {number: engine.source_ranks or [] for number, engine in engines.items()}
        self.shares_memory = any(setup.rank in sources for sources in self._sources.values())
        # Every rank takes part in creating every group; an engine served by one rank needs none.
        self._groups = {
            number: dist.new_group(members, setup.timeout, "gloo") if len(members) > 1 else None
            for number, sources in self._sources.items()
            for members in (sorted(set(sources)),)
        }
        self._handles: dict[int, dict[int, str]] = {}
        self._taking: list[Future] = []

    def begin(self, link: Link) -> None:
        self._link = link

    def prepare(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._handles = {
            number: {r: handle(bucket, flat) for r, source in enumerate(sources) if source == self.rank}
            for number, sources in self._sources.items()
            if self.rank in sources
        }

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        names = list(bucket.slots)
        for number, own in self._handles.items():
            handles = self._collect(number, own)
            if handles is not None:
                client = self._link.clients[number]
                taking = client.update_weights_from_tensor(handles, load_format="flattened_bucket", flush_cache=False)
                self._taking.append(self._link.loop.start(delivery(client.url, names, taking)))
        self._handles = {}

    def _collect(self, number: int, own: dict[int, str]) -> list[str] | None:
        """The handles of all ranks of an engine, on the trainer rank that talks to it."""
        group, engine = self._groups[number], self.engines[number]
        leads = self.rank == engine.lead
        collected = [own]
        if group is not None:
            collected = [{}] * dist.get_world_size(group)
            dist.gather_object(own, collected if leads else None, dst=engine.lead, group=group)
        if not leads:
            return None
        handles = {rank: text for part in collected for rank, text in part.items()}
        return [handles[rank] for rank in range(engine.tp_size)]

    def wait(self) -> None:
        taking, self._taking = self._taking, []
        for future in taking:
            future.exception()  # all are awaited, even if one fails
        for future in taking:
            future.result()
        if self.shares_memory and torch.cuda.is_initialized():
            torch.cuda.ipc_collect()

    def end(self) -> None:
        assert not self._taking and not self._handles

    def abandon(self) -> None:
        taking, self._handles, self._taking = self._taking, {}, []
        for future in taking:
            future.exception()  # an engine may still read this memory
