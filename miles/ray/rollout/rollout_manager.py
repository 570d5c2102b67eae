"""RolloutManager: the Ray actor between prompts and training batches."""

import asyncio
import copy
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from transformers import AutoTokenizer

from miles.config import RunConfig
from miles.config.names import flag_of
from miles.config.residency import policy_of
from miles.ray.rollout.engine_memory import EngineMemory, RolloutMemory
from miles.ray.rollout.engines import Engines
from miles.ray.rollout.rollout_state import read_state, write_state
from miles.ray.rollout.run_length import longest_sample, with_num_rollout
from miles.ray.rollout.training_data import RolloutResult, training_data
from miles.residency.plan import ENGINE_REGIONS, Move, Region, back, engine_leaves
from miles.rewards.compute import load_reward
from miles.rollout.collector import Collected, Collector
from miles.rollout.engine_pool import EnginePool
from miles.rollout.evaluate import Evaluator, evaluation_metrics
from miles.rollout.group_runner import GroupRunner
from miles.rollout.hooks import Hooks, load_hooks
from miles.rollout.prompts.data_source import errors_of_source, load_data_source, take_groups
from miles.rollout.sample_io import load_samples, save_samples
from miles.rollout.sessions.server import close_server
from miles.rollout.sft_rollout import sft_samples
from miles.rollout.teacher import Teacher
from miles.utils.disk import writing
from miles.utils.errors import UserError
from miles.utils.garbage import collect_rarely
from miles.utils.json_values import as_json
from miles.utils.loop_watch import LoopWatch
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

Groups = Sequence[Sequence[Sample]]


class RolloutManager:
    """Reads prompts, has the engines answer them, scores the answers and cuts them into shards for the trainer.

    An asyncio actor. The constructor reads tokenizer, prompts, reward and the user's functions, so that bad input is
    refused before an engine starts; `start()` asks the teacher of --opd-type sglang whether it can be used, and starts
    the engines.

    Args:
        config: the run's configuration.
        engines: handles of `SGLangEngine` or `ExternalEngine` actors, not started; empty where the run needs none.
        router: handle of an `SGLangRouter` or `ExternalRouter` actor, not started: it chooses the engine of each
            request. Without one each goes to the engine with the fewest samples in flight.
    """

    def __init__(self, config: RunConfig, engines: list[ActorHandle], router: ActorHandle | None = None) -> None:
        self._config = config
        self._engines = Engines(config, engines, router)
        self._policy = policy_of(config)
        self._tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
        self._hooks = load_hooks(config, self._tokenizer)
        self._data = load_data_source(config, self._tokenizer)
        self._evaluator = Evaluator(config, self._tokenizer, self._hooks)
        if config.needs_engines:
            load_reward(config)
        with_teacher = config.needs_engines and config.use_opd and config.opd_type == "sglang"
        self._teacher = Teacher(config, self._tokenizer) if with_teacher else None
        self._memory = RolloutMemory([], self._engines.check)
        # Where there are engines, from the start on.
        self._pool: EnginePool | None = None
        self._collector: Collector | None = None
        # --fully-async: the collector, once it generates, and when that began, or the last batch was handed out.
        self._background: Collector | None = None
        self._last_batch = 0.0
        self._watch: LoopWatch | None = None
        # Since memory left: no function of the user's can reach the engines.
        self._cut_off = False
        # One step ahead: the rollout that was begun last, and the state from before it.
        self._before: tuple[int, dict[str, Any]] | None = None

    async def start(self) -> None:
        """Start all engines, then the router, and wait until they are healthy.

        If one fails, all that Miles started is ended and its error is raised. Where their memory may move, its size is
        asked for, too.
        """
        config, engines = self._config, self._engines
        self._watch = LoopWatch()
        try:
            if self._teacher is not None:
                await self._teacher.check(longest_sample(config, self._data))
            await engines.start()
        except Exception:
            engines.kill()
            if self._teacher is not None:
                await self._teacher.close()
            raise
        if config.needs_engines:
            self._pool = engines.pool(self._tokenizer)
            self._collector = Collector(config, self._data, self._pool, self._hooks, self._teacher)
        self._memory = RolloutMemory(
            [
                EngineMemory(f"engine {rank} ({client.url})", client)
                for rank, client in enumerate(engines.clients[: config.num_colocated_engines])
            ],
            engines.check,
            self._cut_off_what_is_left,
        )
        if self._policy.offload_rollout:
            await self._memory.measure()
        collect_rarely()

    async def check_engines(self) -> None:
        """Raise ServersEnded if the server of an engine or the router has ended: for whoever's call to one failed.

        The error has the engine's name, how it ended, its log file and the tail of that.
        """
        await self._engines.check()

    async def engine_urls(self) -> list[str]:
        """URL of each engine's server, by engine rank."""
        return self._engines.urls

    async def resolved_config(self) -> RunConfig:
        """The configuration with `num_rollout` set, which `--num-epoch` leaves open until the prompts are counted.

        Raises:
            ValueError: there is nothing to train in that many rollouts.
        """
        with errors_of_source(self._config):
            prompts = len(self._data)
        return with_num_rollout(self._config, prompts)

    async def generate(self, rollout_id: int) -> RolloutResult:
        """Make the training data of one rollout; with --fully-async, take it from what is generated all the time.

        Raises:
            ResidencyError: engine memory is away, or released weights were not updated since.
        """
        config, start = self._config, time.monotonic()
        if config.one_step_ahead:
            # Before the first await: a save while this rollout is made keeps what was there before it.
            self._before = (rollout_id, self._state())
        async with self._memory.in_use(f"rollout {rollout_id}"):
            self._let_in()
            version = await self._engines.version()
            groups, metrics = await self._groups(rollout_id, version)
        if self._background is not None:
            start, self._last_batch = self._last_batch, time.monotonic()
        seconds = time.monotonic() - start
        metrics = {**metrics, "perf/rollout_time": seconds}
        if self._pool is not None:
            assert config.rollout_num_gpus is not None, "it is derived where engines run"
            new_tokens = sum(sample.response_length for group in groups for sample in group)
            metrics["perf/tokens_per_gpu_per_sec"] = new_tokens / seconds / config.rollout_num_gpus
        return training_data(config, self._hooks, rollout_id, groups, version, metrics, seconds)

    async def _groups(self, rollout_id: int, version: int | None) -> tuple[Groups, dict[str, float]]:
        """The groups to be trained on, and what is known of how they were made.

        Args:
            version: of the engines' weights.
        """
        config, hooks = self._config, self._hooks
        if config.load_debug_rollout_data is not None:
            return await self._loaded(rollout_id, config.load_debug_rollout_data), {}
        if hooks.rollout is not None:
            with self._reachable_engines():
                output = await hooks.rollout(config, rollout_id, self._data)
            made = Collected(output.samples, output.samples, dict(output.metrics))
        elif self._collector is None:
            made = self._supervised()
        else:
            made = await self._collected(self._collector, rollout_id, version)
        hooks.show_all_samples(config, made.all_groups, self._data)
        hooks.filter_samples(config, made.groups)
        await self._dump(rollout_id, made.groups, None)
        return made.groups, made.metrics

    def _supervised(self) -> Collected:
        groups = take_groups(self._config, self._data, self._config.rollout_batch_size)
        sft_samples(groups, self._tokenizer)
        return Collected(groups, groups, {})

    def _reachable_engines(self) -> AbstractContextManager[Any]:
        """While it is open, functions of the user's find the engines, if there are any."""
        return nullcontext() if self._pool is None else self._pool.active()

    async def _loaded(self, rollout_id: int, path: str) -> Groups:
        config = self._config
        groups = await asyncio.to_thread(load_samples, path, rollout_id, config.hf_checkpoint)
        there = len({sample.trajectory for group in groups for sample in group})
        if there != config.samples_per_rollout:
            raise UserError(
                f"--load-debug-rollout-data {path}: rollout {rollout_id} has {there} samples in {len(groups)} groups, "
                f"and --rollout-batch-size {config.rollout_batch_size} with --n-samples-per-prompt "
                f"{config.n_samples_per_prompt} makes {config.samples_per_rollout}; give what the run had that saved it"
            )
        return groups

    async def _collected(self, collector: Collector, rollout_id: int, version: int | None) -> Collected:
        if not self._config.fully_async:
            return await collector.collect(rollout_id, version)
        if self._background is None:
            # Not before the first weight sync: the weights of a checkpoint may be others.
            self._background, self._last_batch = collector, time.monotonic()
            collector.start()
        return await collector.take(rollout_id, version)

    async def hold(self) -> None:
        """Cut off all generation, and begin none, until `release`: new weights are about to come.

        What was written is kept; with --partial-rollout it is gone on with, without it the samples begin anew.
        """
        await self._running_pool.hold()

    async def release(self) -> None:
        """Let generation go on, with the weights that have come."""
        self._running_pool.release()

    @property
    def _running_pool(self) -> EnginePool:
        assert self._pool is not None, "no engines run"
        return self._pool

    async def evaluate(self, rollout_id: int, before_training: bool) -> dict[str, float]:
        """Sample and score every evaluation set; returns `eval/*` metrics.

        Args:
            rollout_id: the rollout whose weights the engines have.
            before_training: they are those of the run's start instead.

        Raises:
            ResidencyError: engine memory is away, or released weights were not updated since.
        """
        config, hooks = self._config, self._hooks
        async with self._memory.in_use(f"the evaluation after rollout {rollout_id}"):
            self._let_in()
            if self._background is not None:
                self._background.pause()
            try:
                if hooks.evaluate is None:
                    output = await self._evaluator.run(rollout_id, self._evaluation_runner)
                    metrics = dict(output.metrics)
                else:
                    with self._reachable_engines():
                        output = await hooks.evaluate(config, rollout_id, self._data)
                    metrics = evaluation_metrics(config, output.data) | dict(output.metrics)
            finally:
                if self._background is not None:
                    self._background.resume()
        for name, samples in output.data.items():
            await self._dump(rollout_id, [samples], f"{name}-before_train" if before_training else name)
        return {} if hooks.log_eval(config, rollout_id, output.data, metrics) else metrics

    def _evaluation_runner(self, hooks: Hooks) -> GroupRunner:
        # What generates looks for the limit where a rollout has it.
        config = self._config.model_copy(update={"rollout_max_context_len": self._config.eval_max_context_len})
        return GroupRunner(config, self._running_pool, hooks, evaluation=True)

    async def _dump(self, rollout_id: int, groups: Groups, evaluation: str | None) -> None:
        config = self._config
        path = config.save_debug_rollout_data
        if path is not None:
            with writing("--save-debug-rollout-data", path):
                await asyncio.to_thread(
                    save_samples, path, rollout_id, groups, evaluation=evaluation, hf_checkpoint=config.hf_checkpoint
                )

    async def move(self, moves: Sequence[Move]) -> dict[str, float]:
        """Make moves of the planner on all engines, all in one direction, but for those that are made already.

        What leaves loses its contents; running requests are waited for, then aborted. Weights that return are
        undefined: generating is refused until they have been updated.

        Returns:
            perf/offload_rollout_time (seconds) and perf/offload_rollout_bytes (released, of all engines), or
            perf/onload_rollout_*; {} without moves.

        Raises:
            ResidencyError: a rollout or an evaluation still runs, or an engine failed; all others are awaited first.
        """
        return await self._memory.move(moves)

    # Verbs: each says what shall move, and the planner what of it may. Without --offload-rollout nothing does, with it
    # the CUDA graphs and what --offload-rollout-level names.

    async def offload(self, tags: Sequence[str]) -> dict[str, float]:
        """`move` of those of `tags` (cuda_graph, kv_cache, weights) out that may leave. ValueError for any other."""
        return await self.move(engine_leaves(self._policy, *_regions("offload", tags)))

    async def onload(self, tags: Sequence[str]) -> dict[str, float]:
        """`move` of those of `tags` back that may leave. ValueError for any other."""
        return await self.move(back(engine_leaves(self._policy, *_regions("onload", tags))))

    async def offload_kv(self) -> dict[str, float]:
        """`offload` of the CUDA graphs and the key-value cache."""
        return await self.offload([Region.CUDA_GRAPH, Region.KV_CACHE])

    async def offload_weights(self) -> dict[str, float]:
        """`offload` of the weights."""
        return await self.offload([Region.WEIGHTS])

    async def onload_kv(self) -> dict[str, float]:
        """`onload` of the key-value cache and the CUDA graphs."""
        return await self.onload([Region.CUDA_GRAPH, Region.KV_CACHE])

    async def onload_weights(self) -> dict[str, float]:
        """`onload` of the weights; generating is refused until they have been updated."""
        return await self.onload([Region.WEIGHTS])

    async def _cut_off_what_is_left(self) -> None:
        """End the requests that functions of the user's left running: SGLang would end on a release under one.

        What they send from then on, until the next rollout or evaluation, is cut off at once.
        """
        config, pool = self._config, self._pool
        paths = {
            "rollout_function_path": config.rollout_function_path,
            "eval_function_path": config.eval_function_path,
            "custom_generate_function_path": config.custom_generate_function_path,
        }
        flags = [flag_of(field) for field, path in paths.items() if path is not None]
        if pool is None or not flags or self._cut_off:
            return
        if pool.in_flight:
            logger.warning(
                "%d samples are still in flight, though the rollout is over: what %s names has left their requests "
                "running. They are aborted, since the engines' memory leaves: await or cancel all that it begins",
                pool.in_flight,
                " or ".join(flags),
            )
        self._cut_off = True
        await pool.hold()

    def _let_in(self) -> None:
        if self._cut_off:
            self._cut_off = False
            self._running_pool.release()

    async def save(self, folder: Path, rollout_id: int, version: int) -> None:
        """Write into `folder` where the prompts and the samples in flight are between `rollout_id` and the next.

        A rollout that was begun ahead doesn't count: whoever loads this makes it anew.

        Args:
            version: of the engines' weights.
        """
        before = self._before
        state = before[1] if before is not None and before[0] == rollout_id + 1 else self._state()
        await asyncio.to_thread(write_state, folder, state, version)

    async def load(self, folder: Path) -> int:
        """Go on from what `save` wrote into `folder`; returns the version of the weights of then.

        Raises:
            ValueError: the prompts are not those of the saved run, or a file is broken.
        """
        state, version = read_state(folder)
        with errors_of_source(self._config):
            self._data.load_state_dict(state["data"])
        if self._collector is not None and state["collector"] is not None:
            self._collector.load_state_dict(state["collector"])
        return version

    def _state(self) -> dict[str, Any]:
        """Both at one moment: a prompt is either still to come, or the collector has it."""
        collector = None if self._collector is None else self._collector.state_dict()
        with errors_of_source(self._config):
            # A copy: a source of the user's may go on changing what it hands out.
            data = copy.deepcopy(self._data.state_dict())
        return {"data": as_json(data, "what state_dict of the data source returned"), "collector": collector}

    async def dispose(self) -> None:
        """Stop generating, close connections and end the servers that Miles started. A second call does nothing."""
        if self._background is not None:
            stopped, self._background = self._background, None
            await stopped.stop()
        if self._pool is not None:
            await close_server(self._pool)
        if self._teacher is not None:
            await self._teacher.close()
        await self._engines.close()
        if self._watch is not None:
            self._watch.close()


def _regions(verb: str, tags: Sequence[str]) -> list[Region]:
    if unknown := [tag for tag in tags if tag not in ENGINE_REGIONS]:
        raise UserError(f"{verb}: {', '.join(unknown)}: no such tag; there are {', '.join(ENGINE_REGIONS)}")
    return [region for region in ENGINE_REGIONS if region in tags]
