"""Writing the trainer's model as a Hugging Face checkpoint."""

import contextlib
from pathlib import Path

import torch

from miles.hf.writer import HFWriter
from miles.utils.agreement import Agreement
from miles.weight_sync.bucket import views
from miles.weight_sync.format import CheckpointFormat
from miles.weight_sync.gather import Gatherer
from miles.weight_sync.plan import Bucket
from miles.weight_sync.source import WeightSource

BUCKET_BYTES = 256 * 2**20


def save_hf(
    folder: str | Path,
    weights: WeightSource,
    is_writer: bool,
    agreement: Agreement,
) -> None:
    """Write the model to `folder` as a checkpoint that transformers loads, in the parameters' dtype.

    All ranks of `agreement` call it together.

    Args:
        folder: of the new checkpoint.
        weights: what is trained. From its checkpoint all else is copied: configuration and tokenizer files, and weights
            beyond the model.
        is_writer: True on exactly one rank, which writes.
        agreement: of all ranks that hold the model.

    Raises:
        ValueError: `folder` holds something else.
        Exception: what the disk says; where one rank failed all raise, see `Agreement.check`.
    """
    what = f"the export to {folder}"
    gatherer = Gatherer(weights, CheckpointFormat(), BUCKET_BYTES)
    try:
        with contextlib.ExitStack() as stack:
            with agreement.alone(what):
                writer = stack.enter_context(HFWriter(folder, weights.index.folder)) if is_writer else None
            for bucket in gatherer.buckets:
                _write_bucket(gatherer, bucket, writer, agreement, what)
            with agreement.alone(what):
                if writer is not None:
                    for name in weights.untrained:
                        writer.write(name, weights.index.read(name))
                    writer.finish()
    except Exception as error:
        error.add_note(what)
        raise


def _write_bucket(gatherer: Gatherer, bucket: Bucket, writer: HFWriter | None, agreement: Agreement, what: str) -> None:
    with agreement.alone(what):
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=gatherer.source.device)
    failure = gatherer.fill(bucket, flat, everywhere=True)
    with agreement.alone(what):
        if failure is not None:
            raise failure
        if writer is not None:
            for name, tensor in views(bucket, flat).items():
                writer.write(name, tensor)
