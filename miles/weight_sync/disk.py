"""To remote engines through a checkpoint in a folder that trainer and engines both see."""

import contextlib
import shutil
import uuid
from pathlib import Path

import torch

from miles.hf.writer import HFWriter
from miles.utils.disk import writing
from miles.weight_sync.bucket import views
from miles.weight_sync.plan import Bucket
from miles.weight_sync.session import delivery
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.transport import Link, Transport, TransportSetup

FOLDER = "miles_weights"


class DiskTransport(Transport):
    """Rank 0 writes all weights once, every engine loads them, the files are removed; see `Transport`.

    Configuration and tokenizer are copied from the checkpoint; rank 0 collects the bytes of a bucket on the host for
    one file.
    """

    everywhere = True
    touches_at_end = True

    def __init__(self, engines: dict[int, EngineTarget], setup: TransportSetup):
        super().__init__(engines, setup)
        self.source, self.buffer_size = setup.checkpoint_folder, setup.buffer_size
        assert setup.disk_folder is not None
        # Links are left in it: an engine's machine may have its own.
        self.parent = Path(setup.disk_folder).absolute()
        self._writer: HFWriter | None = None
        self._names: list[str] = []

    def begin(self, link: Link) -> None:
        self._link, self._names = link, []
        if self.rank == 0:
            # A name for each update: runs that share the folder would load each other's weights, and a network file
            # system may still show an engine the files that were there before.
            folder = self.parent / f"{FOLDER}_{uuid.uuid4().hex}"
            with self._named():
                self._writer = HFWriter(folder, self.source, self.buffer_size)

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
                writer.finish()
            clients = [self._link.clients[number] for number in self.engines]
            self._link.loop.run(
                delivery(client.url, self._names, client.update_weights_from_disk(str(writer.folder)))
                for client in clients
            )
        finally:
            shutil.rmtree(writer.folder, ignore_errors=True)

    def _named(self) -> contextlib.AbstractContextManager[None]:
        return writing("--update-weight-disk-dir", self.parent)

    def abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.discard()
