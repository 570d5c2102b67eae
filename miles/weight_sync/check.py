"""Whether an engine holds what was sent: `--check-weight-update-equal`."""

import hashlib
import logging
from collections.abc import Iterator

import torch

from miles.hf.block_formats import BlockFormat
from miles.hf.entries import EMBEDDING_END, HEAD
from miles.hf.fp8 import BLOCK, SCALES
from miles.weight_sync.bucket import views
from miles.weight_sync.plan import Bucket
from miles.weight_sync.transport import Link, Transport, TransportSetup

logger = logging.getLogger(__name__)

SHOWN = 8
# Of Gemma 2: in no checkpoint, so that no update restores it, and SGLang does not compute with it.
NEVER_READ = {"model.normalizer"}
Checksums = list[dict[str, str]]  # for each rank of an engine {SGLang's name of a tensor: hash}


class SentHashes(Transport):
    """Hashes what is sent, as SGLang hashes what it holds; a `Transport` that brings it nowhere."""

    everywhere = True

    def __init__(self, setup: TransportSetup):
        super().__init__({}, setup)
        self.hashes: dict[str, str] = {}

    def begin(self, link: Link) -> None:
        self.hashes = {}

    def prepare(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.hashes |= {name: tensor_hash(tensor) for name, tensor in _as_hashed(views(bucket, flat))}


def _as_hashed(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What SGLang hashes of each: of FP8 codes the values that they and their scales stand for, in bf16.

    Codes whose columns are no whole blocks are left out: SGLang takes their blocks to be of another size.
    """
    for name, tensor in tensors.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) in tensors:
            continue
        scales = tensors.get(name + SCALES)
        if scales is None:
            yield name, tensor
        elif tensor.shape[-1] % BLOCK == 0:
            yield name, BlockFormat("F8_E4M3", ("F32",), (BLOCK, BLOCK)).decode(tensor, scales, torch.bfloat16)


def tensor_hash(tensor: torch.Tensor) -> str:
    """The hash of a tensor's bytes in sglang.srt.utils.weight_checker."""
    if tensor.is_cuda:
        from sglang.srt.layers.multimodal import gpu_tensor_hash

        # It reads words of 4 bytes, and a tensor may start between two.
        return f"{gpu_tensor_hash(tensor.clone()):016x}"
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


def compare(url: str, first: Checksums, second: Checksums, sent: dict[str, str]) -> None:
    """Check an engine's checksums after two updates with the same weights; in between it held random numbers.

    A tensor that differs was not written by the second update. Where the engine has one rank, a tensor that it holds
    under the checkpoint's own name must be what was `sent`, bit for bit; others are joined or cut, embedding and head
    may have more rows there.

    Args:
        url: of the engine.
        first: its checksums after the first update.
        second: after the second.
        sent: {name: hash} of what was sent.

    Raises:
        RuntimeError: they differ; with engine and tensors.
    """
    stale = [
        f"{name} of rank {rank}"
        for rank, (before, after) in enumerate(zip(first, second, strict=True))
        for name in sorted((before.keys() | after.keys()) - NEVER_READ)
        if before.get(name) != after.get(name)
    ]
    alike = sorted(first[0].keys() & sent.keys() - {HEAD}) if len(first) == 1 else []
    alike = [name for name in alike if not name.endswith(EMBEDDING_END)]
    changed = [name for name in alike if second[0][name] != sent[name]]
    for names, what in ((stale, "were not overwritten by an update"), (changed, "are not what was sent")):
        if names:
            raise RuntimeError(
                f"--check-weight-update-equal: {len(names)} tensors of {url} {what}: {', '.join(names[:SHOWN])}"
            )
    count = sum(len(rank) for rank in first)
    if not count:
        raise RuntimeError(f"--check-weight-update-equal: {url} reports no tensors")
    logger.info(
        "--check-weight-update-equal: all %d tensors of %s are overwritten by an update; %d of them were compared with "
        "what was sent and are bit-equal", count, url, len(alike),
    )  # fmt: skip
