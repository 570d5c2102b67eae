"""Writing the trainer's model as a Hugging Face checkpoint."""

import contextlib
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.hf.base import Family
from miles.backends.megatron_utils.hf.checkpoint_io import CheckpointIndex, HFWriter
from miles.weight_sync.gather import ParallelInfo, hf_tensors, live


def save_hf(
    folder: str | Path,
    model: torch.nn.Module,
    family: Family,
    hf_config: PreTrainedConfig,
    parallel: ParallelInfo,
    source: str | Path,
    is_writer: bool,
) -> None:
    """Write the model to `folder` as a checkpoint that transformers loads, in the parameters' dtype.

    The parameters must be in memory. All ranks of one model copy call it together; exactly one passes is_writer=True
    and writes. source: the checkpoint that training started from; names are checked against it, configuration and
    tokenizer files are copied from it.
    Raises ValueError where names or shapes differ, FileExistsError where `folder` holds something else.
    """
    tensors = hf_tensors(model, family, hf_config, parallel, CheckpointIndex(source), live)
    with HFWriter(folder, source) if is_writer else contextlib.nullcontext() as writer:
        for name, tensor in tensors:
            if is_writer:
                writer.write(name, tensor)
