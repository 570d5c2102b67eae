"""The groups of a rollout: asked for, refilled, filtered, cut off at its end, and none lost."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles.config import RunConfig
from miles.rollout.engine_pool import EnginePool
from miles.rollout.filter_hub.dynamic_sampling_filters import advice, keep_every_group
from miles.rollout.generate import Sampling
from miles.rollout.group_runner import GroupRunner, Tally
from miles.rollout.hooks import Hooks
from miles.rollout.ledger import Ledger, Outcome
from miles.rollout.progress import Progress
from miles.rollout.prompts.data_source import DataSource, take_groups
from miles.rollout.sample_buffer import Group, SampleBuffer, index_of, is_stale
from miles.rollout.teacher import Teacher
from miles.utils.errors import UserError
from miles.utils.tasks import cancelled
from miles.utils.types import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """One rollout.

    Args:
        groups: rollout_batch_size of them, finished and rewarded, in the order of their group_index.
        all_groups: these, and those that were finished and are not trained on (filtered, failed, dropped). A group that
            is kept for a later rollout is among that one's.
        metrics: those of `rollout/` in `miles.tracking.metrics` that are about groups, failures and retries.
    """

    groups: Sequence[Sequence[Sample]]
    all_groups: Sequence[Sequence[Sample]]
    metrics: dict[str, float]


class Collector:
    """Keeps groups in flight, and hands out rollouts of them.

    Either `collect` is awaited for each rollout; or, with --fully-async, `start` is called once, `take` for each
    rollout, and `stop` in the end. All in one event loop.

    Args:
        config: the run's configuration.
        data: the prompts.
        pool: the engines.
        hooks: `generate`, `keep_group` and `take_from_buffer` are used.
        teacher: of on-policy distillation, or None.
    """

    def __init__(
        self, config: RunConfig, data: DataSource, pool: EnginePool, hooks: Hooks, teacher: Teacher | None = None
    ) -> None:
        assert config.over_sampling_batch_size is not None, "it is derived where it is not given"
        assert config.over_sampling_batch_size >= config.rollout_batch_size
        self._most_asked = config.over_sampling_batch_size
        self._config = config
        self._data = data
        self._pool = pool
        self._hooks = hooks
        self._runner = GroupRunner(config, pool, hooks, teacher)
        self._sampling = Sampling.for_rollout(config)
        self._target = config.rollout_batch_size
        self._buffer = SampleBuffer()
        self._ledger = Ledger()
        self._rollout_id = 0
        self._version: int | None = None
        self._kept: list[Group] = []
        self._running: dict[int, tuple[asyncio.Task[Group], Group]] = {}  # by group_index, until it is settled
        self._ended: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue()  # None: look whether there is room
        self._stopping = False
        self._producer: asyncio.Task[None] | None = None
        self._produced = asyncio.Event()
        self._paused = False
        self._start_counting()

    # A rollout at a time

    async def collect(self, rollout_id: int, version: int | None) -> Collected:
        """Make one rollout, and leave nothing in flight.

        --over-sampling-batch-size groups are asked for at once: surplus and unfinished ones of earlier rollouts first,
        then prompts. Each that is refused is replaced. When enough are kept, the engines are told to stop; what is
        finished by then waits for the next rollout, and so does what is not: with its responses, or, without
        --partial-rollout, with those that ended.

        After an error, or cancelled, all groups are in the buffer.

        Args:
            rollout_id: for the progress bar and the buffer filter.
            version: of the engines' weights; None: unknown, nothing is stale.

        Raises:
            RuntimeError: too many generations or rewards failed, or too many groups were refused.
            EnginesLost, ValueError: see `GroupRunner.run`; and what filters of the user raise.
        """
        assert not self._running and self._producer is None, "one rollout at a time"
        self._rollout_id, self._version, self._stopping = rollout_id, version, False
        progress = Progress(f"Rollout {rollout_id}", self._config.samples_per_rollout)
        try:
            self._keep_finished(progress)
            while len(self._kept) < self._target:
                self._ask(self._most_asked - len(self._kept) - len(self._running))
                for group in await self._finished_groups():
                    if not self._passes(group):
                        continue
                    if len(self._kept) < self._target:
                        self._keep(group, progress)
                    else:
                        self._store(group, Outcome.SURPLUS)
                self._check(len(self._kept))
            await self._cut_off()
            return self._rollout()
        finally:
            progress.close()
            self._unkeep()
            await self._end_tasks()

    async def _cut_off(self) -> None:
        """End what is in flight."""
        self._stopping = True
        if not self._running:
            return
        try:
            await self._pool.hold()
            while self._running:
                for group in await self._finished_groups():
                    if not all(sample.is_finished for sample in group):
                        self._store(group, Outcome.UNFINISHED)
                    elif self._passes(group):
                        self._store(group, Outcome.SURPLUS)
        finally:
            self._pool.release()
        self._check(len(self._kept))

    # All the time

    def start(self) -> None:
        """Generate from now on, in the background, until --async-data-buffer-capacity-factor rollouts are there."""
        assert self._producer is None and not self._running
        self._stopping = False
        self._producer = asyncio.create_task(self._produce())
        self._producer.add_done_callback(lambda _: self._produced.set())

    async def take(self, rollout_id: int, version: int | None) -> Collected:
        """Wait until a rollout is there, and take it: the groups that were finished first.

        Args:
            version: of the engines' weights, which --max-weight-staleness is counted from; None: nothing is stale.

        Raises:
            What `collect` raises, if it happened in the background since the last rollout.
        """
        assert self._producer is not None, "start() comes first"
        self._rollout_id, self._version = rollout_id, version
        progress = Progress(f"Rollout {rollout_id}", self._config.samples_per_rollout)
        try:
            while True:
                if self._producer.done():
                    self._producer.result()
                self._keep_finished(progress)
                if len(self._kept) == self._target:
                    return self._rollout()
                self._produced.clear()
                self._look_for_room()  # what was stale has made some
                await self._produced.wait()
        finally:
            progress.close()
            self._unkeep()
            self._look_for_room()

    def pause(self) -> None:
        """Ask for nothing new until `resume`; what is in flight goes on."""
        self._paused = True

    def resume(self) -> None:
        """End `pause`."""
        self._paused = False
        self._look_for_room()

    async def stop(self) -> None:
        """End what `start` began; the groups in flight are put into the buffer."""
        if self._producer is None:
            return
        producer, self._producer = self._producer, None
        if producer.done() and not producer.cancelled() and producer.exception() is not None:
            logger.error("generation had failed in the background", exc_info=producer.exception())
        await cancelled(producer)

    async def _produce(self) -> None:
        config = self._config
        assert config.async_max_concurrent_samples is not None, "it is derived where it is not given"
        most_running = max(1, config.async_max_concurrent_samples // config.n_samples_per_prompt)
        capacity = int(config.async_data_buffer_capacity_factor * self._target)
        try:
            while True:
                waiting = len(self._buffer.finished) + len(self._kept)
                room = min(most_running, capacity - waiting) - len(self._running)
                self._ask(0 if self._paused else room)
                for group in await self._finished_groups():
                    if self._passes(group):
                        self._store(group, Outcome.SURPLUS)
                        self._produced.set()
                self._check(len(self._buffer.finished) + len(self._kept))
        finally:
            await self._end_tasks()

    def _look_for_room(self) -> None:
        self._ended.put_nowait(None)

    # State

    def state_dict(self) -> dict[str, Any]:
        """For JSON, and a copy: every group that was taken from the prompts and not handed out.

        Those in flight are as they were before the request that is under way.
        """
        return self._buffer.state_dict(self._kept, [group for _, group in self._running.values()])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the groups of `state`; before the first rollout.

        Raises: ValueError if their size isn't --n-samples-per-prompt.
        """
        assert not self._buffer and not self._running
        self._buffer.load_state_dict(state, self._config.n_samples_per_prompt)
        self._ledger.load(len(self._buffer))

    # Groups on their way

    def _ask(self, count: int) -> None:
        """Set `count` groups to work: of the buffer first, then of the prompts."""
        if count <= 0:
            return
        again = self._from_unfinished(count)
        for group in again:
            self._work_on(group)
        if len(again) < count:
            for group in take_groups(self._config, self._data, count - len(again)):
                self._ledger.take(group, new=True)
                self._work_on(group)

    def _work_on(self, group: Group) -> None:
        task = asyncio.create_task(self._runner.run(group, self._sampling, self._should_stop))
        task.add_done_callback(self._ended.put_nowait)
        self._running[index_of(group)] = (task, group)

    def _should_stop(self) -> bool:
        return self._stopping

    def _keep_finished(self, progress: Progress) -> None:
        """Keep the oldest finished groups, as many as the rollout misses, of those that are not stale."""
        while self._buffer.finished and len(self._kept) < self._target:
            group = self._buffer.finished.popleft()
            self._ledger.take(group, new=False)
            if not self._refuses_stale(group):
                self._keep(group, progress)

    def _keep(self, group: Group, progress: Progress) -> None:
        self._running.pop(index_of(group), None)
        self._kept.append(group)
        progress.update(self._config.n_samples_per_prompt)

    def _unkeep(self) -> None:
        """Of a rollout that did not come about."""
        for group in reversed(self._kept):
            self._ledger.settle(group, Outcome.SURPLUS)
            self._buffer.finished.appendleft(group)
        self._kept = []

    def _store(self, group: Group, outcome: Outcome) -> None:
        """For a later rollout."""
        self._settle(group, outcome)
        (self._buffer.finished if outcome is Outcome.SURPLUS else self._buffer.unfinished).append(group)

    def _from_unfinished(self, count: int) -> list[Group]:
        again: list[Group] = []
        while len(again) < count and self._buffer.unfinished:
            groups, thrown_away = self._hooks.take_from_buffer(
                self._config, self._rollout_id, self._buffer.unfinished, count - len(again)
            )
            for group in (*groups, *thrown_away):
                self._ledger.take(group, new=False)
            for group in thrown_away:
                self._ledger.settle(group, Outcome.FILTERED)
            if not groups:
                break
            # What is stale is in the buffer again then, without the responses that made it so.
            again += [group for group in groups if not self._refuses_stale(group)]
        return again

    async def _finished_groups(self) -> list[Group]:
        """The groups that came to an end since the last call; waits for one, or for `_look_for_room`."""
        ended = [await self._ended.get()]
        while not self._ended.empty():
            ended.append(self._ended.get_nowait())
        return sorted((task.result() for task in ended if task is not None), key=index_of)

    async def _end_tasks(self) -> None:
        """Cancel what is in flight, if anything is, and put its groups into the buffer."""
        await cancelled(*(task for task, _ in self._running.values()))
        for _, group in list(self._running.values()):
            self._store(group, Outcome.UNFINISHED)
        self._ended = asyncio.Queue()

    # What becomes of them

    def _passes(self, group: Group) -> bool:
        """Whether a finished group may be trained on; if not, it is settled."""
        self._tried += 1
        if all(sample.status is Sample.Status.FAILED for sample in group):
            self._refuse(group, Outcome.FAILED)
            return False
        decision = self._hooks.keep_group(self._config, group)
        if not decision.keep:
            self._drops[(decision.reason or "unnamed").replace("/", "_")] += 1
            self._refuse(group, Outcome.FILTERED)
            return False
        self._passed += 1
        return True

    def _refuses_stale(self, group: Group) -> bool:
        if not is_stale(group, self._version, self._config.max_weight_staleness):
            return False
        self._stale += 1
        if self._config.fully_async and self._config.async_unused_samples_handler == "drop":
            self._refuse(group, Outcome.DROPPED)
        else:
            self._settle(group, Outcome.STALE)
            self._buffer.ask_again(group)
        return True

    def _refuse(self, group: Group, outcome: Outcome) -> None:
        self._settle(group, outcome)
        self._refused.append(group)

    def _settle(self, group: Group, outcome: Outcome) -> None:
        self._running.pop(index_of(group), None)
        self._ledger.settle(group, outcome)

    def _check(self, kept: int) -> None:
        """Raise UserError if the rollout goes wrong: too many failures, or too many groups were refused."""
        config = self._config
        self._runner.check(config.samples_per_rollout)
        most = config.dynamic_sampling_max_batches * self._target
        if self._tried < most or kept >= self._target:
            return
        drops = "".join(f", {count} were filtered as {reason}" for reason, count in self._drops.most_common())
        drops += f", {self._stale} were stale" if self._stale else ""
        failed = self._tried - self._passed - self._drops.total()
        drops += f", {failed} failed" if failed else ""
        ways = advice(self._drops) + ["another --dynamic-sampling-filter-path"] * bool(self._drops)
        ways += ["a larger --max-weight-staleness"] * bool(self._stale) + ["a higher bound"]
        raise UserError(
            f"rollout {self._rollout_id} tried {self._tried} groups (--dynamic-sampling-max-batches "
            f"{config.dynamic_sampling_max_batches} x --rollout-batch-size {self._target}) and has {kept} of the "
            f"{self._target} that it needs: {self._passed} passed{drops}. Give {'; or '.join(ways)}"
        )

    def _rollout(self) -> Collected:
        """The rollout that is kept, with the books closed."""
        groups = sorted(self._kept, key=index_of)
        for group in groups:
            self._ledger.settle(group, Outcome.TRAINED)
        self._kept = []
        finished = [group for group in self._refused if all(sample.is_finished for sample in group)]
        everything = sorted([*groups, *finished], key=index_of)
        collected = Collected(groups, everything, self._metrics())
        self._start_counting()
        return collected

    def _metrics(self) -> dict[str, float]:
        metrics = self._ledger.close(self._running, len(self._buffer)) | self._pool.take_metrics()
        if self._hooks.keep_group is not keep_every_group:
            judged = self._passed + self._drops.total()
            if judged:
                metrics["rollout/dynamic_filter/keep_ratio"] = self._passed / judged
            metrics |= {f"rollout/dynamic_filter/drop_{name}": float(n) for name, n in sorted(self._drops.items())}
        return metrics | self._runner.tally.metrics(self._config)

    def _start_counting(self) -> None:
        """Of what went wrong on the way to a rollout."""
        self._runner.tally = Tally()
        self._refused: list[Group] = []
        self._drops: Counter[str] = Counter()
        self._tried = self._passed = self._stale = 0
