"""Megatron's save of a sharded state, with the error of the disk that it keeps to itself."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from miles.utils.errors import AnotherRankFailed


def write_sharded(folder: Path, state: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write `state`, a dict of Megatron's sharded tensors, to `folder`, which exists. All ranks call it together.

    Raises:
        Exception: what this rank's writer raised. Megatron turns it into "Worker failure: <class 'OSError'>".
        AnotherRankFailed: another rank could not write, and Megatron told this one.
    """
    kept: list[Exception] = []
    write = FileSystemWriterAsync.write_preloaded_data

    def keeping(*args: Any, **kwargs: Any) -> tuple[int, list | Exception]:
        output = write(*args, **kwargs)
        if isinstance(output[1], Exception):
            kept.append(output[1])
        return output

    FileSystemWriterAsync.write_preloaded_data = staticmethod(keeping)
    try:
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if kept:
            raise kept[0] from error
        if not isinstance(error, CheckpointException):
            raise
        own = error.failures.get(dist.get_rank())
        raise own[0] if own else AnotherRankFailed(f"writing {folder} failed on another rank: {error}") from error
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
