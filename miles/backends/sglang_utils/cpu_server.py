"""`python -m miles.backends.sglang_utils.cpu_server ...`: `sglang.launch_server` on a CPU, with what it lacks there.

SGLang draws by a request's own seed only in deterministic mode, whose attention backends, matrix kernels and hash need
a GPU. The draw itself does not. Two hooks of SGLang's plugin framework supply what is missing, so that a sample depends
on its prompt, its seed and the weights, whatever else is in the batch: a resumed run draws what the straight run drew.

Its checksums of the weights need no GPU either, but for one line. Its attention takes sequences one by one;
`cpu_attention` takes them together.

With `CPU_MEMORY_SAVER` in its environment it also gives memory back when told to (see `cpu_memory`).

Nearly all of a start is imports, which SGLang makes in each of its processes anew: here they are made once, in the
process that the others are forked from. And without Megatron, which SGLang imports where it is installed, only to read
the ranks of a trainer in the same process.

The hooks are registered on import because a process that SGLang spawns imports the main module again.
"""

import gc
import os
import runpy
import sys
from unittest import mock

import torch

# Importing it raises ImportError, as if it were not installed.
if __name__ in ("__main__", "__mp_main__"):
    sys.modules["megatron"] = None  # type: ignore[assignment]

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from miles.backends.sglang_utils import cpu_attention, cpu_fp8, cpu_memory, deepseek_v4, float32_copies
from miles.backends.sglang_utils.arguments import CPU_MEMORY_SAVER
from miles.backends.sglang_utils.forked import forked

SEED_IF_NONE_GIVEN = 42  # as in SGLang's deterministic mode
MASK_32 = 0xFFFFFFFF


def _keep_seeds(info, cls, batch, vocab_size):
    """After SamplingBatchInfo.from_schedule_batch: the seed of each request, int64 [requests]."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor([SEED_IF_NONE_GIVEN if seed is None else seed for seed in seeds])


def _freeze_objects(result, scheduler, *args, **kwargs):
    """After Scheduler.__init__: keep what there is by then out of all later garbage collections.

    On a CPU each flush of the cache is one: 0.3 s over the objects of all imported modules.
    """
    gc.collect()
    gc.freeze()


def _checksum(compute, checker):
    """Around WeightChecker._compute_checksum, which waits for a GPU before it looks at the time."""
    with mock.patch.object(torch.cuda, "synchronize", lambda: None):
        return compute(checker)


def draw(log_probs_RV: torch.Tensor, seed_R: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
    """One token id a row, [R, 1]: the arg max of log-probability plus Gumbel noise hashed from (seed, position, id)."""
    row_R = _mix(_mix(_mix(seed_R & MASK_32) ^ (seed_R >> 32 & MASK_32)) ^ position_R)
    second_R = _mix(row_R ^ 0x5BD1E995)
    column_V = _mix(torch.arange(log_probs_RV.shape[1]) + 1)
    hash_RV = _mix(_mix(row_R[:, None] ^ column_V) ^ second_R[:, None])
    uniform_RV = (hash_RV.double() + 0.5) / 2**32
    return (log_probs_RV.double() - (-uniform_RV.log()).log()).argmax(dim=1, keepdim=True)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 (https://github.com/aappleby/smhasher), on 32-bit numbers held as int64."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & MASK_32
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & MASK_32
    return x ^ (x >> 16)


HookRegistry.register(
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _keep_seeds, HookType.AFTER
)
HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", draw, HookType.REPLACE)
HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _freeze_objects, HookType.AFTER)
HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker._compute_checksum", _checksum, HookType.AROUND)
float32_copies.register()
deepseek_v4.register()
cpu_attention.register()
cpu_fp8.register()
if CPU_MEMORY_SAVER in os.environ:
    cpu_memory.register()

if __name__ == "__main__":
    with forked():
        runpy.run_module("sglang.launch_server", run_name="__main__")
