"""Brings the trainer's weights into the engines, in lockstep on all trainer ranks."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.hf.base import Family
from miles.backends.megatron_utils.hf.checkpoint_io import CheckpointIndex
from miles.backends.sglang_utils.client import SGLangClient
from miles.weight_sync.bucket import SharedBucket, buckets
from miles.weight_sync.gather import NamedTensor, ParallelInfo, Read, hf_tensors, make_plan
from miles.weight_sync.session import UpdateSession
from miles.weight_sync.target import EngineTarget


class WeightUpdater:
    """Sends the weights of a Megatron model to its engines.

    Build it on every trainer rank, after the process groups; all ranks call `update` together.

    model: this stage's GPTModel, unwrapped. checkpoint_folder: where the engines loaded their weights from.
    rank: this process in the trainer's world. group: a gloo group of all trainer ranks, for agreement.
    buffer_size: bytes of one bucket (--update-weight-buffer-size). A trainer rank holds two at a time (the gathered
    tensors and their flat copy), an engine maps the copy. flush_cache: empty the engines' caches before the first
    bucket; False where their memory is away during an update, in which case they were emptied before.
    Raises ValueError where names or shapes of model and checkpoint differ.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        family: Family,
        hf_config: PreTrainedConfig,
        parallel: ParallelInfo,
        checkpoint_folder: str | Path,
        engines: list[EngineTarget],
        rank: int,
        group: dist.ProcessGroup,
        buffer_size: int,
        flush_cache: bool,
        timeout: timedelta,
    ):
        self.model, self.family, self.hf_config, self.parallel = model, family, hf_config, parallel
        self.engines, self.rank, self.group, self.buffer_size = engines, rank, group, buffer_size
        self.flush_cache = flush_cache
        self.index = CheckpointIndex(checkpoint_folder)
        self.names = list(make_plan(family, hf_config, parallel.stage_layers, self.index).shapes)
        # Every rank takes part in creating every group; an engine served by one rank needs none.
        self._engine_groups = [
            dist.new_group(members, timeout, "gloo") if len(members) > 1 else None
            for members in (sorted(set(engine.source_ranks)) for engine in engines)
        ]

    def update(self, version: int, read: Read) -> dict[str, float]:
        """Send every weight and set the engines' version; returns metrics (`perf/update_weights_*`).

        read: gives a parameter's values (see `hf_tensors`); the parameters themselves are not touched.
        Raises RuntimeError on every rank where one rank or engine failed; the engines are released first.
        """
        start, sent_bytes, sent_tensors = time.perf_counter(), 0, 0
        tensors = hf_tensors(self.model, self.family, self.hf_config, self.parallel, self.index, read)
        with asyncio.Runner() as runner:
            sessions = {
                number: UpdateSession(SGLangClient(engine.url), self.names, version, self.flush_cache)
                for number, engine in enumerate(self.engines)
                if engine.source_ranks[0] == self.rank
            }
            try:
                self._together(runner, [session.open() for session in sessions.values()])
                stream = buckets(tensors, self.buffer_size)
                while bucket := self._next(stream):
                    self._send(runner, sessions, bucket)
                    sent_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
                    sent_tensors += len(bucket)
                    # Its tensors would live on until the next bucket is full.
                    bucket.clear()
                self._together(runner, [session.finish() for session in sessions.values()])
            finally:
                runner.run(_all(session.release() for session in sessions.values()))
        assert sent_tensors == len(self.names)
        if next(self.model.parameters()).is_cuda:
            # The engines take their memory back next: none of the buckets' may stay cached here.
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - start
        return {
            "perf/update_weights_time": seconds,
            "perf/update_weights_bytes": sent_bytes,
            "perf/update_weights_tensors": sent_tensors,
            "perf/update_weights_gb_per_s": sent_bytes / seconds / 1e9,
        }

    def _next(self, stream: Iterator[list[NamedTensor]]) -> list[NamedTensor] | None:
        """The next bucket, once every rank has made it; None after the last."""
        bucket, failure = None, None
        try:
            bucket = next(stream, None)
        except (OSError, RuntimeError, ValueError) as error:
            failure = error
        self._agree(failure)
        return bucket

    def _send(self, runner: asyncio.Runner, sessions: dict[int, UpdateSession], bucket: list[NamedTensor]) -> None:
        names = [name for name, _ in bucket]
        failure, shared, payloads = None, None, {}
        if any(self.rank in engine.source_ranks for engine in self.engines):
            try:
                shared = SharedBucket(bucket)
            except (RuntimeError, ValueError) as error:
                failure = error
        self._agree(failure)
        for number, engine in enumerate(self.engines):
            if self.rank in engine.source_ranks:
                payloads[number] = self._collect_handles(number, engine, shared)
        self._together(
            runner,
            [
                session.send(
                    names,
                    session.client.update_weights_from_tensor(
                        payloads[number], load_format="flattened_bucket", flush_cache=False
                    ),
                )
                for number, session in sessions.items()
            ],
        )
        # All engines have answered, on all ranks: the memory can go.
        del shared
        if bucket[0][1].is_cuda:
            torch.cuda.ipc_collect()

    def _collect_handles(self, number: int, engine: EngineTarget, shared: SharedBucket) -> list[str] | None:
        """The handles of all the engine's ranks, on the rank that talks to it."""
        own = {rank: shared.handle() for rank, source in enumerate(engine.source_ranks) if source == self.rank}
        group, lead = self._engine_groups[number], engine.source_ranks[0]
        collected = [own]
        if group is not None:
            collected = [None] * dist.get_world_size(group) if self.rank == lead else None
            dist.gather_object(own, collected, dst=lead, group=group)
        if self.rank != lead:
            return None
        handles = {rank: handle for part in collected for rank, handle in part.items()}
        return [handles[rank] for rank in range(engine.tp_size)]

    def _together(self, runner: asyncio.Runner, actions: list[Coroutine[None, None, None]]) -> None:
        """Run this rank's actions side by side and wait for all ranks' actions."""
        failure = None
        try:
            runner.run(_all(actions))
        except RuntimeError as error:
            failure = error
        self._agree(failure)

    def _agree(self, failure: Exception | None) -> None:
        """Raise on every rank if any rank failed: the others would wait for it in the next collective call."""
        failed = torch.tensor(int(failure is not None))
        dist.all_reduce(failed, group=self.group)
        if not failed:
            return
        messages = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(messages, failure and str(failure), group=self.group)
        texts = "; ".join(f"trainer rank {rank}: {text}" for rank, text in enumerate(messages) if text)
        raise RuntimeError(f"the weight update failed: {texts}") from failure


async def _all(actions) -> None:
    """Run all actions to their end, then raise the first failure."""
    results = await asyncio.gather(*actions, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
