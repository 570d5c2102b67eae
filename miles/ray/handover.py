"""The hand-over between engines, critic and actor: who is on the GPUs, and the new weights, with a version each."""

import logging
import time
from collections import Counter
from collections.abc import Mapping

from miles.config import RunConfig
from miles.config.residency import policy_of
from miles.ray.rollout.client import RolloutClient
from miles.ray.train.models import TrainingModels
from miles.residency.executor import Executor, Service
from miles.residency.plan import Clear, Move, Party, Phase, Step, Sync, plan
from miles.utils.units import GB
from miles.weight_sync.target import EngineTarget

logger = logging.getLogger(__name__)

# Of these a `_time` and a `_bytes` are counted, and a `_gb_per_s` follows.
TRANSFERS = ("perf/sleep", "perf/wake_up", "perf/offload_rollout", "perf/onload_rollout")


class Handover:
    """Moves all sides in and out of the GPUs and brings the actor's weights into the engines.

    What moves when is `miles.residency.plan`'s; here are the points of the driver at which it happens. Does nothing
    where the engines or the trainer are missing.

    Args:
        config: the run's configuration.
        rollout: client of the RolloutManager, with its engines started.
        models: what is trained, not built yet.

    Attributes:
        version: of the weights that were sent last. A resumed run goes on counting.
    """

    def __init__(self, config: RunConfig, rollout: RolloutClient, models: TrainingModels):
        self.config = config
        self.rollout = rollout
        self.models = models
        self.active = config.needs_engines and config.needs_trainer
        self.version = 0
        self._policy = policy_of(config)
        # clear_memory is asked of trainers alone.
        services: dict[Party, Service] = {Party.ENGINE: rollout, Party.ACTOR: models.actor}  # type: ignore[dict-item]
        if models.critic is not None:
            services[Party.CRITIC] = models.critic
        self._executor = Executor(self._policy, services, self._sync)
        # Of the step: the sums of what its moves took so far, and whether the actor has had no turn in it.
        self._moved: Counter[str] = Counter()
        self._critic_alone = False

    async def build_models(self) -> None:
        """Build the actor and its critic, one after the other, and load their weights or checkpoints.

        The engines make room for them, and each leaves the GPUs once it is built, until there is a batch.
        """
        await self._set_up(Phase.ENGINES_UP)
        if self.config.needs_trainer:
            await self.models.actor.init()
        await self._set_up(Phase.TRAINER_BUILT)
        if self.models.critic is not None:
            await self.models.critic.init()
            await self._set_up(Phase.CRITIC_BUILT)

    async def initial_sync(self, version: int) -> None:
        """Connect both sides and send the first weights: the engines' own, or those of a loaded checkpoint.

        Args:
            version: of the weights that the run had sent last when its checkpoint was saved; 0 for a new run.
        """
        self.version = version
        if self.active:
            urls = await self.rollout.engine_urls()
            await self.models.actor.connect([self._target(rank, url) for rank, url in enumerate(urls)])
            await self._set_up(Phase.FIRST_SYNC)

    async def disconnect(self) -> None:
        """The run is over: engines that were there before it, and stay, forget the trainer."""
        if self.active and self.config.rollout_external:
            await self.models.actor.disconnect()

    async def to_training(self) -> None:
        """The batch is there: the engines leave, the first model to be trained comes."""
        self._moved.clear()
        self._critic_alone = self.models.critic is not None
        await self._in_step(Phase.AFTER_GENERATE)

    async def to_actor(self) -> None:
        """The critic is trained and saved: it leaves, the actor comes."""
        await self._in_step(Phase.AFTER_CRITIC)
        self._critic_alone = False

    async def to_rollout(self) -> dict[str, float]:
        """The step is trained: the last model leaves, the engines come and get the actor's weights as the next version.

        Engines that kept their weights keep them where the actor had no turn.

        Returns: perf metrics of all moves of the step, those of several models added up, and of the sync.
        """
        await self._in_step(Phase.AFTER_CRITIC_ONLY if self._critic_alone else Phase.AFTER_TRAIN)
        return {**self._moved, **_speeds(self._moved)}

    def before_critic_save(self) -> None:
        """Raise ResidencyError unless all that the critic's checkpoint holds is on the GPU."""
        self._check(Phase.BEFORE_CRITIC_SAVE)

    def before_save(self) -> None:
        """Raise ResidencyError unless all that the actor's checkpoint holds is on the GPU."""
        self._check(Phase.BEFORE_SAVE)

    def _check(self, phase: Phase) -> None:
        if self.active:
            self._executor.check(phase)

    async def _set_up(self, phase: Phase) -> None:
        if not self.active:
            return
        begin = time.monotonic()
        metrics = await self._executor.run(phase)
        if steps := plan(phase, self._policy):
            size = sum(metrics.get(f"{name}_bytes", 0) for name in TRANSFERS) / GB
            logger.info("%s: %s: %.1f s, %.2f GB", phase, describe(steps), time.monotonic() - begin, size)

    async def _in_step(self, phase: Phase) -> None:
        if self.active:
            self._moved.update(await self._executor.run(phase))

    async def _sync(self) -> dict[str, float]:
        self.version += 1
        if not self.config.fully_async:
            return await self._update()
        # The engines never rest: what they are writing is cut off, and goes on with the new weights.
        try:
            await self.rollout.hold()
            return await self._update()
        finally:
            await self.rollout.release()

    async def _update(self) -> dict[str, float]:
        try:
            return await self.models.actor.update_weights(self.version)
        except Exception:
            await self.rollout.check_engines()  # the end of a server says more than a lost connection
            raise

    def _target(self, engine: int, url: str) -> EngineTarget:
        """A colocated engine reads the memory of the trainer ranks on its bundles; a remote one is sent the weights."""
        gpus, size = self.config.rollout_num_gpus_per_engine, self.config.engine_tp_size
        if engine < self.config.num_colocated_engines:
            return EngineTarget(url, size, list(range(engine * gpus, engine * gpus + size)))
        return EngineTarget(url, size, None)


def describe(steps: tuple[Step, ...]) -> str:
    """A plan in words: "actor grads leaves, engine weights returns, sync"."""
    words = []
    for step in steps:
        match step:
            case Move(party, region):
                words.append(f"{party} {region} {'leaves' if step.leaves else 'returns'}")
            case Clear(party):
                words.append(f"{party} caches cleared")
            case Sync():
                words.append("sync")
    return ", ".join(words)


def _speeds(metrics: Mapping[str, float]) -> dict[str, float]:
    """GB/s of each transfer that took time."""
    return {
        f"{name}_gb_per_s": metrics[f"{name}_bytes"] / GB / metrics[f"{name}_time"]
        for name in TRANSFERS
        if metrics.get(f"{name}_time")
    }
