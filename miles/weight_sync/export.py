"""Writing the trainer's model as a Hugging Face checkpoint."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.hf_weights import untrained_names
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.parallel import ParallelInfo
from miles.hf.writer import HFWriter
from miles.utils.agreement import Agreement
from miles.weight_sync.gather import Gatherer, live, views

BUCKET_BYTES = 256 * 2**20


def save_hf(
    folder: str | Path,
    chunks: list[torch.nn.Module],
    family: Family,
    hf_config: PreTrainedConfig,
    parallel: ParallelInfo,
    source: str | Path,
    is_writer: bool,
    agreement: Agreement,
) -> None:
    """Write the model to `folder` as a checkpoint that transformers loads, in the parameters' dtype.

    What the source has beyond the model (layers for further tokens) is copied.

    The parameters must be in memory. All ranks of `agreement` call it together; exactly one passes is_writer=True and
    writes. chunks: this stage's GPTModels, unwrapped. source: the checkpoint that training started from; names are
    checked against it, configuration and tokenizer files are copied from it.

    Raises:
        ValueError: names or shapes differ, or `folder` holds something else.
        Exception: what the disk says; where one rank failed all raise, see `Agreement.check`.
    """
    index, what = CheckpointIndex(source), f"the export to {folder}"
    gatherer = Gatherer(chunks, family, hf_config, parallel, index, BUCKET_BYTES, copies=True)
    writer: HFWriter | None = None
    try:
        with agreement.alone(what):
            if is_writer:
                writer = HFWriter(folder, source).__enter__()
        for bucket in gatherer.buckets:
            with agreement.alone(what):
                flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=gatherer.device)
            failure = gatherer.fill(bucket, flat, live, everywhere=True)
            with agreement.alone(what):
                if failure is not None:
                    raise failure
                if writer is not None:
                    for name, tensor in views(bucket, flat).items():
                        writer.write(name, tensor)
            del flat
        with agreement.alone(what):
            if writer is not None:
                for name in untrained_names(index, family, hf_config):
                    writer.write(name, index.read(name))
                writer.__exit__(None, None, None)
                writer = None
    except Exception as error:
        error.add_note(what)
        if writer is not None:
            writer.__exit__(type(error), error, error.__traceback__)
        raise
