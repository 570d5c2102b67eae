"""TrainGroup: the trainer's ranks as one object, with one async call per verb."""

import asyncio

import ray

from miles.config import RunConfig
from miles.ray.lazy_actor import ActorClient
from miles.weight_sync.target import EngineTarget


class TrainGroup:
    """Fans each call out to every rank and returns when all ranks are done.

    Args:
        config: the run's configuration.
        rank_options: Ray options of every rank, in rank order (see Placement.options).
    """

    def __init__(self, config: RunConfig, rank_options: list[dict]):
        self.config = config
        # A worker process of its own, so that Megatron's environment is set before torch is imported.
        environment = {"env_vars": _environment(config)}
        self.ranks = [
            ActorClient(
                "miles.backends.megatron_utils.actor.MegatronTrainRayActor",
                config,
                rank,
                len(rank_options),
                options={**options, "runtime_env": environment},
            )
            for rank, options in enumerate(rank_options)
        ]

    async def _all(self, method: str, *args, per_rank: list | None = None) -> list:
        calls = [
            getattr(actor, method)(*args, *(() if per_rank is None else (per_rank[rank],)))
            for rank, actor in enumerate(self.ranks)
        ]
        # All are awaited even if one fails: no rank works on after the call.
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = {rank: result for rank, result in enumerate(results) if isinstance(result, BaseException)}
        if failures:
            raise _cause(failures)
        return results

    async def init(self) -> None:
        """Build process groups and model on every rank and load the weights."""
        address = await self.ranks[0].master_address()
        await self._all("init", address)

    async def start_rollout_id(self) -> int:
        """The first rollout to train: the one after the loaded checkpoint's, else 0."""
        ids = set(await self._all("start_rollout_id"))
        assert len(ids) == 1, f"ranks loaded different checkpoints: {ids}"
        return ids.pop()

    async def connect(self, engines: list[EngineTarget]) -> None:
        """Tell the ranks which engines get their weights."""
        await self._all("connect", engines)

    async def disconnect(self) -> None:
        """Leave nothing of the weight sync in engines that live on."""
        await self._all("disconnect")

    async def update_weights(self, version: int) -> dict[str, float]:
        """Send the weights to every engine; returns perf metrics."""
        return _merged(await self._all("update_weights", version))

    async def train(self, rollout_id: int, shards: list[ray.ObjectRef]) -> dict[str, float]:
        """Train on one rollout; `shards` holds one object reference a data-parallel rank. Returns train/* metrics."""
        ranks_of_shard = self.config.tensor_model_parallel_size * self.config.context_parallel_size
        dp_size = self.config.data_parallel_size
        assert len(shards) == dp_size, f"{len(shards)} shards for {dp_size} data-parallel ranks"
        # Megatron's rank order is tensor, context, data, pipeline.
        per_rank = [shards[rank // ranks_of_shard % dp_size] for rank in range(len(self.ranks))]
        return _merged(await self._all("train", rollout_id, per_rank=per_rank))

    async def save(self, rollout_id: int) -> None:
        """Write this rank's part of the checkpoint of `rollout_id` (the marker is the caller's)."""
        await self._all("save", rollout_id)

    async def export_hf(self, rollout_id: int) -> None:
        """Write the weights as a Hugging Face checkpoint under --save-hf."""
        await self._all("export_hf", rollout_id)

    async def sleep(self) -> dict[str, float]:
        """Move the trainer off the GPUs; returns perf metrics, as the next verbs do."""
        return _added_up(await self._all("sleep"))

    async def wake_up(self) -> dict[str, float]:
        """Bring the trainer back to the GPUs."""
        return _added_up(await self._all("wake_up"))

    async def onload(self) -> dict[str, float]:
        """Wake up ahead of `train`, which would do it too."""
        return _added_up(await self._all("onload"))

    async def offload_grad_buffer(self) -> dict[str, float]:
        """Drop the gradients ahead of the sleep."""
        return _added_up(await self._all("offload_grad_buffer"))

    async def destroy_process_groups(self) -> dict[str, float]:
        """Destroy the sub process groups after a weight sync in the sleep."""
        return _added_up(await self._all("destroy_process_groups"))

    async def clear_memory(self) -> dict[str, float]:
        """Give the allocators' cached memory back."""
        return _added_up(await self._all("clear_memory"))


def _cause(failures: dict[int, BaseException]) -> BaseException:
    """The failure that says most, with the others as notes: a ValueError names the cause; others may only follow it."""
    first = next((error for error in failures.values() if isinstance(error, ValueError)), next(iter(failures.values())))
    for rank, error in failures.items():
        if error is not first:
            first.add_note(f"trainer rank {rank} failed too: {error}")
    return first


def _added_up(results: list[dict[str, float]]) -> dict[str, float]:
    """One number from those of all ranks: of times the longest, of bytes the sum."""
    names = {name for result in results for name in result}
    return {
        name: (max if name.endswith("_time") else sum)(result[name] for result in results if name in result)
        for name in sorted(names)
    }


def _merged(results: list[dict[str, float]]) -> dict[str, float]:
    """Ranks report disjoint metrics; most report none."""
    merged = {}
    for result in results:
        assert not merged.keys() & result.keys(), f"two ranks report {merged.keys() & result.keys()}"
        merged.update(result)
    return merged


def _environment(config: RunConfig) -> dict[str, str]:
    if config.device == "cuda":
        # Megatron needs it for overlapping communication with computation on one queue.
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        if config.num_engines > config.num_colocated_engines:
            # As SGLang sets it in engines: the two ends of a broadcast must share memory in the same way.
            environment["NCCL_CUMEM_ENABLE"] = "0"
        return environment
    # Compiling costs minutes on a laptop and buys nothing for small tensors.
    return {"TORCH_COMPILE_DISABLE": "1"}
