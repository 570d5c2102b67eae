"""To remote engines through a checkpoint in a folder that trainer and engines both see."""

import contextlib
import shutil
import uuid
from pathlib import Path

import torch

from miles.hf.writer import HFWriter
from miles.utils.disk import writing
from miles.weight_sync.gather import views
from miles.weight_sync.plan import Bucket
from miles.weight_sync.session import delivery
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.transport import Link, Transport

FOLDER = "miles_weights"


class DiskTransport(Transport):
    """Rank 0 writes all weights once, every engine loads them, the files are removed; see `Transport`.

    engines: by number. rank: this process. folder: on a file system that all of them share. source: the checkpoint that
    configuration and tokenizer are copied from. buffer_size: bytes that rank 0 collects on the host for one file.
    """

    everywhere = True
    shares_memory = False
    touches_at_end = True

    def __init__(
        self, engines: dict[int, EngineTarget], rank: int, folder: str | Path, source: str | Path, buffer_size: int
    ):
        self.engines, self.writes, self.source, self.buffer_size = engines, rank == 0, source, buffer_size
        # Links are left in it: an engine's machine may have its own.
        self.parent = Path(folder).absolute()
        self._writer: HFWriter | None = None
        self._names: list[str] = []

    def begin(self, link: Link) -> None:
        self._link, self._names = link, []
        if self.writes:
            # A name for each update: runs that share the folder would load each other's weights, and a network file
            # system may still show an engine the files that were there before.
            folder = self.parent / f"{FOLDER}_{uuid.uuid4().hex}"
            with self._named():
                self._writer = HFWriter(folder, self.source, self.buffer_size).__enter__()

    def prepare(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._names += bucket.slots
        if self._writer is not None:
            with self._named():
                for name, tensor in views(bucket, flat).items():
                    self._writer.write(name, tensor)

    def end(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            with self._named():
                writer.__exit__(None, None, None)
            clients = [self._link.clients[number] for number in self.engines]
            self._link.loop.run(
                delivery(client.url, self._names, client.update_weights_from_disk(str(writer.folder)))
                for client in clients
            )
        finally:
            for folder in (writer.folder, writer.partial):
                shutil.rmtree(folder, ignore_errors=True)

    def _named(self) -> contextlib.AbstractContextManager[None]:
        return writing("--update-weight-disk-dir", self.parent)

    def abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.__exit__(RuntimeError, None, None)  # removes what was written
