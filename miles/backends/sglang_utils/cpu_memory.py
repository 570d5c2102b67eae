"""Hooks with which SGLang's release and resume of memory are real on a CPU, where its own memory saver can't run.

The storages of the key-value pool and of the model's parameters are resized to nothing and back, in place: every tensor
keeps its identity, so that updates of the weights write where the model reads. As on a GPU contents are lost. Weights
come back as NaN, so that a missing update can't go unnoticed; the pool comes back as zeros, as SGLang makes it. Buffers
of the model (rotary tables) stay: SGLang itself copies them around a release.

One scheduler a process: what is away is kept in this module.
"""

from collections.abc import Iterable

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from miles.utils.host_memory import return_freed_memory
from miles.utils.units import GIB

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# What a byte of a returned storage is. A float of ones only is NaN in every width: fp32, bf16, fp16, and fp8.
FILL = {GPU_MEMORY_TYPE_WEIGHTS: 0xFF, GPU_MEMORY_TYPE_KV_CACHE: 0}

_away: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}


def register() -> None:
    """Register the hooks; call it on import of the server's main module."""
    HookRegistry.register(f"{UPDATER}.release_memory_occupation", _after_release, HookType.AFTER)
    HookRegistry.register(f"{UPDATER}.resume_memory_occupation", _before_resume, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.get_internal_state", _exact_usage, HookType.AFTER)


def release(tag: str, tensors: Iterable[torch.Tensor]) -> None:
    """Give the memory behind `tensors` back to the system, until `resume(tag)`; they may share storages."""
    assert tag not in _away, f"{tag} is released already"
    # Held, so that no two have the same address.
    _away[tag] = [(storage, storage.nbytes()) for storage in _storages(tensors)]
    for storage, _ in _away[tag]:
        storage.resize_(0)
    return_freed_memory()


def resume(tag: str) -> None:
    """Take the memory back that `release(tag, ...)` gave away, filled with `FILL[tag]`."""
    for storage, nbytes in _away.pop(tag):
        storage.resize_(nbytes)
        torch.tensor([], dtype=torch.uint8).set_(storage).fill_(FILL[tag])


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once: a tied head is its embedding."""
    return list({storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def _tensors(scheduler) -> dict[str, list[torch.Tensor]]:
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(pool, MHATokenToKVPool):
        cache = [*pool.k_buffer, *pool.v_buffer]
    elif isinstance(pool, MLATokenToKVPool):
        cache = list(pool.kv_buffer)
    else:
        raise NotImplementedError(f"releasing a {type(pool).__name__} on a CPU: run with --no-offload-rollout")
    weights = list(scheduler.tp_worker.model_runner.model.parameters())
    return {GPU_MEMORY_TYPE_KV_CACHE: cache, GPU_MEMORY_TYPE_WEIGHTS: weights}


def _after_release(result, manager, request):
    tensors = _tensors(manager.scheduler)
    for tag in request.tags or GPU_MEMORY_ALL_TYPES:
        if tag in FILL:
            release(tag, tensors[tag])


def _before_resume(manager, request):
    for tag in request.tags or GPU_MEMORY_ALL_TYPES:
        if tag in FILL:
            resume(tag)


def _exact_usage(result, scheduler, request):
    """After Scheduler.get_internal_state: the bytes behind each tag, in GB of 2**30 bytes as SGLang has them.

    SGLang's own figure for the weights is how much the machine's free memory fell, whoever took it.
    """
    usage = result.internal_state["memory_usage"]
    tensors = _tensors(scheduler)
    for tag, name in ((GPU_MEMORY_TYPE_WEIGHTS, "weight"), (GPU_MEMORY_TYPE_KV_CACHE, "kvcache")):
        away = sum(nbytes for _, nbytes in _away.get(tag, ()))
        usage[name] = (away + sum(storage.nbytes() for storage in _storages(tensors[tag]))) / GIB
