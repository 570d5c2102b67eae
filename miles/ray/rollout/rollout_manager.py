"""RolloutManager: the Ray actor between prompts and training batches."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle
from transformers import AutoTokenizer

from miles.backends.sglang_utils.client import SGLangClient
from miles.backends.sglang_utils.router import RouterClient
from miles.config import RunConfig
from miles.ray.rollout.engine_memory import EngineMemory, RolloutMemory
from miles.residency.plan import Region
from miles.residency.policy import policy_of
from miles.rewards import check_errors, compute_rewards, has_reward, load_reward
from miles.rollout.data_source import RolloutDataSource
from miles.rollout.evaluate import EvaluationSets
from miles.rollout.generate import GroupGenerator, Sampling
from miles.rollout.metrics import eval_metrics, rollout_metrics
from miles.rollout.progress import Progress
from miles.rollout.sft_rollout import sft_samples
from miles.rollout.teacher import Teacher
from miles.training.advantages import counted_rewards, shape_rewards
from miles.training.batch import TrainBatch
from miles.training.schedule import plan_for, shard
from miles.utils.types import Sample

DATA_STATE_FILE = "data_source.json"


@dataclass(frozen=True)
class RolloutResult:
    """One rollout: a reference to the `TrainShard` of each data-parallel rank, and the metrics."""

    shards: list[ray.ObjectRef]
    metrics: dict[str, float]


class RolloutManager:
    """Reads prompts, has the engines answer them, scores the answers and cuts them into shards for the trainer.

    An asyncio actor. The constructor reads tokenizer, prompts and reward, so that bad input is refused before an engine
    starts; `start()` asks the teacher of --opd-type sglang whether it can be used, and starts the engines.

    Args:
        config: the run's configuration.
        engines: handles of `SGLangEngine` or `ExternalEngine` actors, not started; empty where the run needs none.
        router: handle of an `SGLangRouter` or `ExternalRouter` actor, not started: it chooses the engine of each
            sample. Without one each group goes to the engine with the fewest samples in flight.
    """

    def __init__(self, config: RunConfig, engines: list[ActorHandle], router: ActorHandle | None = None) -> None:
        self._config = config
        self._engines = engines
        self._router = router
        self._urls: list[str] = []
        self._clients: list[SGLangClient] = []
        self._router_client: RouterClient | None = None
        policy = policy_of(config)
        self._movable = frozenset((Region.CUDA_GRAPH, *policy.levels) if policy.offload_rollout else ())
        self._tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
        self._data = RolloutDataSource(config, self._tokenizer)
        self._evaluation_sets = EvaluationSets(config, self._tokenizer)
        if config.needs_engines:
            load_reward(config)
        with_teacher = config.needs_engines and config.use_opd and config.opd_type == "sglang"
        self._teacher = Teacher(config, self._tokenizer) if with_teacher else None
        self._generator: GroupGenerator | None = None
        self._memory = RolloutMemory([], self._movable, self.check_engines)

    async def start(self) -> None:
        """Start all engines, then the router, and wait until they are healthy. If one fails, all that Miles started is
        ended and its error is raised.

        Where their memory may move, its size is asked for, too.
        """
        config = self._config
        try:
            if self._teacher is not None:
                await self._teacher.check(self._longest_sample())
            self._urls = await asyncio.gather(*(engine.start.remote() for engine in self._engines))
            router_url = None if self._router is None else await self._router.start.remote(self._urls)
        except Exception:
            for part in self._parts():
                ray.kill(part)  # others may still be starting; a server ends with its actor
            if self._teacher is not None:
                await self._teacher.close()
            raise
        limits = {"request_timeout": config.rollout_request_timeout, "retries": config.rollout_request_retries}
        self._clients = [SGLangClient(url, **limits) for url in self._urls]
        if router_url is not None:
            self._router_client = RouterClient(router_url, **limits)
        if self._clients:
            routed = self._router_client is not None
            self._generator = GroupGenerator(
                config,
                [self._router_client] if routed else self._clients,
                config.sglang_server_concurrency * (len(self._clients) if routed else 1),
                self._tokenizer,
                self.check_engines,
            )
        self._memory = RolloutMemory(
            [
                EngineMemory(f"engine {rank} ({client.url})", client)
                for rank, client in enumerate(self._clients[: config.num_colocated_engines])
            ],
            self._movable,
            self.check_engines,
        )
        await self._memory.measure()

    async def engine_urls(self) -> list[str]:
        """URL of each engine's server, by engine rank."""
        return self._urls

    async def check_engines(self) -> None:
        """Raise, with the tail of its log, if an engine or the router has died."""
        await asyncio.gather(*(part.check.remote() for part in self._parts()))

    async def resolved_config(self) -> RunConfig:
        """The configuration with `num_rollout` set, which `--num-epoch` leaves open until the prompts are counted.

        Raises:
            ValueError: there is nothing to train in that many rollouts.
        """
        config = self._config
        if config.num_rollout is not None:
            return config
        prompts = config.num_epoch * len(self._data)
        num_rollout = prompts // config.rollout_batch_size
        if num_rollout == 0:
            raise ValueError(
                f"--num-epoch {config.num_epoch} of --prompt-data {' '.join(config.prompt_data)} is {prompts} "
                f"prompts, fewer than one rollout takes: lower --rollout-batch-size {config.rollout_batch_size}, or "
                "give --num-rollout instead"
            )
        if config.use_critic and config.num_critic_only_steps >= num_rollout:
            raise ValueError(
                f"--num-critic-only-steps {config.num_critic_only_steps} leaves none of the {num_rollout} rollouts of "
                f"--num-epoch {config.num_epoch} to the actor; give at most {num_rollout - 1}"
            )
        return config.model_copy(update={"num_rollout": num_rollout})

    async def generate(self, rollout_id: int) -> RolloutResult:
        """Make the training data of one rollout.

        Raises:
            ResidencyError: engine memory is away, or released weights were not updated since.
        """
        start = time.monotonic()
        metrics = {}
        async with self._memory.in_use(f"rollout {rollout_id}"):
            groups = self._data.get_samples(self._config.rollout_batch_size)
            if self._generator is None:
                sft_samples(groups, self._tokenizer)
            else:
                sampling = Sampling.for_rollout(self._config)
                errors = await self._sample_and_reward(groups, sampling, f"Rollout {rollout_id}", self._teacher)
                if has_reward(self._config):
                    metrics["rollout/reward_error_ratio"] = errors / self._config.samples_per_rollout
        seconds = time.monotonic() - start

        samples = [sample for group in groups for sample in group]
        _check_complete(samples, self._config.samples_per_rollout)
        rewards = self._training_rewards(samples)
        metrics |= rollout_metrics(samples, rewards if has_reward(self._config) else None)
        metrics["perf/rollout_time"] = seconds
        if self._generator is not None:
            new_tokens = sum(sample.response_length for sample in samples)
            metrics["perf/tokens_per_gpu_per_sec"] = new_tokens / seconds / self._config.rollout_num_gpus
        return RolloutResult(self._shards(TrainBatch.from_samples(samples, rewards)), metrics)

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Sample and score every set of `--eval-prompt-data`; returns `eval/*` metrics.

        Raises:
            ResidencyError: engine memory is away, or released weights were not updated since.
        """
        metrics = {}
        async with self._memory.in_use(f"the evaluation after rollout {rollout_id}"):
            for name, groups in self._evaluation_sets.groups().items():
                sampling = Sampling.for_eval(self._config, name)
                description = f"Evaluation {name} after rollout {rollout_id}"
                await self._sample_and_reward(groups, sampling, description, evaluation=True)
                metrics |= eval_metrics(name, [sample for group in groups for sample in group])
        return metrics

    async def offload(self, tags: Sequence[str]) -> dict[str, float]:
        """Release engine memory: those of `tags` (cuda_graph, kv_cache, weights) that may leave; its contents are lost.

        Without --offload-rollout nothing may leave, with it the CUDA graphs and what --offload-rollout-level names.
        What is away already stays away. Waits for running requests, then aborts them.

        Returns:
            perf/offload_rollout_time (seconds) and perf/offload_rollout_bytes (released, of all engines).

        Raises:
            ValueError: a tag is unknown.
            ResidencyError: a rollout or an evaluation still runs, or an engine failed; all others are awaited first.
        """
        return await self._memory.offload(tags)

    async def onload(self, tags: Sequence[str]) -> dict[str, float]:
        """Take engine memory back, under the same rule: those of `tags` that are away. The weights come back undefined.

        Returns and raises as `offload`; the metrics are perf/onload_rollout_*.
        """
        return await self._memory.onload(tags)

    async def offload_kv(self) -> dict[str, float]:
        """`offload` of the CUDA graphs and the key-value cache."""
        return await self.offload([Region.CUDA_GRAPH, Region.KV_CACHE])

    async def offload_weights(self) -> dict[str, float]:
        """`offload` of the weights."""
        return await self.offload([Region.WEIGHTS])

    async def onload_kv(self) -> dict[str, float]:
        """`onload` of the key-value cache and the CUDA graphs."""
        return await self.onload([Region.KV_CACHE, Region.CUDA_GRAPH])

    async def onload_weights(self) -> dict[str, float]:
        """`onload` of the weights; generating is refused until they have been updated."""
        return await self.onload([Region.WEIGHTS])

    async def save(self, folder: Path) -> None:
        """Write the position in the prompts into `folder`."""
        (Path(folder) / DATA_STATE_FILE).write_text(json.dumps(self._data.state_dict()))

    async def load(self, folder: Path) -> None:
        """Go to the position that `save` wrote into `folder`.

        Raises:
            ValueError: the prompts are not those of the saved run.
        """
        self._data.load_state_dict(json.loads((Path(folder) / DATA_STATE_FILE).read_text()))

    async def dispose(self) -> None:
        """Close connections and end the servers that Miles started. A second call does nothing."""
        for client in (*self._clients, self._router_client, self._teacher):
            if client is not None:
                await client.close()
        await asyncio.gather(*(part.shutdown.remote() for part in self._parts()))

    def _parts(self) -> list[ActorHandle]:
        return self._engines if self._router is None else [*self._engines, self._router]

    def _longest_sample(self) -> int:
        """Tokens of prompt and response that a sample may have."""
        config = self._config
        longest = self._data.longest_prompt + config.rollout_max_response_len
        return min(longest, config.rollout_max_context_len or longest)

    async def _sample_and_reward(
        self,
        groups: list[list[Sample]],
        sampling: Sampling,
        description: str,
        teacher: Teacher | None = None,
        *,
        evaluation: bool = False,
    ) -> int:
        """Complete all samples, reward each group as soon as it is complete, and return how many rewards failed.

        A teacher looks at the group at the same time.
        """
        progress = Progress(description, sum(map(len, groups)))
        counts = []

        async def finish(group: list[Sample]) -> None:
            looking = None if teacher is None else asyncio.create_task(teacher.score(group))
            try:
                counts.append(await compute_rewards(self._config, group, evaluation=evaluation))
                if looking is not None:
                    await looking
            finally:
                if looking is not None:
                    looking.cancel()
            progress.update(len(group))

        try:
            await self._generator.run(groups, sampling, finish)
        finally:
            progress.close()
        check_errors(counts, self._config.max_reward_error_fraction)
        return sum(count.errors for count in counts)

    def _training_rewards(self, samples: list[Sample]) -> list[float] | None:
        """What each sample's tokens are trained with; None where nothing is rewarded."""
        if self._generator is None:
            return None
        config = self._config
        return shape_rewards(
            # That estimator leaves rewards as they are.
            "reinforce_plus_plus" if config.disable_rewards_normalization else config.advantage_estimator,
            counted_rewards(samples),
            [sample.group_index for sample in samples],
            [sample.trajectory for sample in samples],
            std=not config.disable_grpo_std_normalization,
        ).tolist()

    def _shards(self, batch: TrainBatch) -> list[ray.ObjectRef]:
        config = self._config
        if not config.needs_trainer:
            return []
        plan = plan_for(config, batch)
        return [ray.put(shard(batch, plan, rank)) for rank in range(config.data_parallel_size)]


def _check_complete(samples: list[Sample], asked: int) -> None:
    """Raise unless exactly the rollouts that were asked for have come back whole, each in one or more samples."""
    indices = [sample.index for sample in samples]
    rollouts, different = len({sample.trajectory for sample in samples}), len(set(indices))
    if rollouts != asked or different != len(samples):
        raise RuntimeError(
            f"asked for {asked} rollouts, got {rollouts} in {len(samples)} samples with {different} different indices"
        )
    done = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    unfinished = {sample.index: sample.status.value for sample in samples if sample.status not in done}
    if unfinished:
        raise RuntimeError(
            f"{len(unfinished)} of {len(samples)} samples are not finished: {dict(list(unfinished.items())[:10])}"
        )
    assert indices == sorted(indices), "samples must stay in the order of their indices"
