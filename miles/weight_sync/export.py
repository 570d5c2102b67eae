"""Writing the trainer's model as a Hugging Face checkpoint."""

import contextlib
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.hf.base import Family
from miles.backends.megatron_utils.hf.checkpoint_io import CheckpointIndex, HFWriter, untrained_names
from miles.weight_sync.gather import hf_tensors, live
from miles.weight_sync.parallel import ParallelInfo


def save_hf(
    folder: str | Path,
    chunks: list[torch.nn.Module],
    family: Family,
    hf_config: PreTrainedConfig,
    parallel: ParallelInfo,
    source: str | Path,
    is_writer: bool,
) -> None:
    """Write the model to `folder` as a checkpoint that transformers loads, in the parameters' dtype.

    What the source has beyond the model (layers for further tokens) is copied.

    The parameters must be in memory. All ranks of one model copy (with expert parallelism: all ranks) call it together;
    exactly one passes is_writer=True and writes. chunks: this stage's GPTModels, unwrapped. source: the checkpoint that
    training started from; names are checked against it, configuration and tokenizer files are copied from it.
    Raises ValueError where names or shapes differ, or where `folder` holds something else.
    """
    index = CheckpointIndex(source)
    tensors = hf_tensors(chunks, family, hf_config, parallel, index, live)
    with HFWriter(folder, source) if is_writer else contextlib.nullcontext() as writer:
        for name, tensor in tensors:
            if is_writer:
                writer.write(name, tensor)
        if is_writer:
            for name in untrained_names(index, family, hf_config):
                writer.write(name, index.read(name))
