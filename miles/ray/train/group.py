"""A model's ranks as one object, with one async call per verb: TrainGroup the actor's, CriticGroup the critic's."""

import asyncio
import logging
from collections.abc import Sequence

import ray

from miles.backends.megatron_utils.launch import MEGATRON
from miles.config import RunConfig
from miles.ray.lazy_actor import ActorClient
from miles.ray.train.failures import Failure, cause
from miles.residency.plan import Move
from miles.utils.checkpoint_folder import find_checkpoint
from miles.weight_sync.target import EngineTarget

logger = logging.getLogger(__name__)

# That ranks have, once one has failed, to end by themselves.
GRACE_SECONDS = 30.0


class RankGroup:
    """Fans each call out to every rank and returns when all ranks are done.

    A failure is logged as soon as its rank has it. Ranks that have not answered GRACE_SECONDS later, since they wait
    for the failed one, are ended. The first failure is raised, with the others as notes.

    Args:
        config: the run's configuration.
        rank_options: Ray options of every rank, in rank order (see Placement.options).
        nodes: the machine of every rank.
    """

    launch = MEGATRON
    name: str

    def __init__(self, config: RunConfig, rank_options: list[dict], nodes: list[str]):
        self.config = config
        self.who = [f"{self.name} rank {rank} on {node}" for rank, node in enumerate(nodes)]
        # A worker process of its own, so that its environment is set before torch is imported.
        environment = {"env_vars": self.launch.environment(config) | config.train_env_vars}
        self.ranks = [
            ActorClient(
                self._rank_class,
                config,
                rank,
                len(rank_options),
                options={**options, "runtime_env": environment},
            )
            for rank, options in enumerate(rank_options)
        ]

    @property
    def _rank_class(self) -> str:
        """Path of the class of a rank."""
        raise NotImplementedError

    async def _all(self, method: str, *args, per_rank: list[tuple] | None = None) -> list:
        """Call `method` on every rank with `args`, and then those of its own."""
        calls = [
            getattr(actor, method)(*args, *(() if per_rank is None else per_rank[rank]))
            for rank, actor in enumerate(self.ranks)
        ]
        failures: list[Failure] = []

        async def answer(rank: int) -> object:
            try:
                return await calls[rank]
            except Exception as error:
                failure = Failure(self.who[rank], error)
                failures.append(failure)
                log = logger.info if failure.follows else logger.error
                log("%s failed in %s: %s", failure.who, method, "; ".join(filter(None, (failure.text, failure.advice))))
                raise

        answers = [asyncio.ensure_future(answer(rank)) for rank in range(len(calls))]
        if not answers:
            return []
        _, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=GRACE_SECONDS)
        if not failures:
            return [done.result() for done in answers]
        # No rank works on after the call.
        ended = [rank for rank, call in enumerate(answers) if call in waiting]
        for rank in ended:
            logger.error("%s is still in %s, and is ended", self.who[rank], method)
            self.ranks[rank].kill()
            answers[rank].cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        raise cause(method, failures, [self.who[rank] for rank in ended], GRACE_SECONDS)

    async def init(self) -> None:
        """Build process groups and model on every rank and load the weights."""
        addresses = await self._all("master_address")
        await self._all("init", addresses[0])

    async def connect(self, engines: list[EngineTarget]) -> None:
        """Tell the ranks which engines get their weights."""
        await self._all("connect", engines)

    async def disconnect(self) -> None:
        """Leave nothing of the weight sync in engines that live on."""
        await self._all("disconnect")

    async def update_weights(self, version: int) -> dict[str, float]:
        """Send the weights to every engine; returns perf metrics."""
        return _merged(await self._all("update_weights", version))

    def _shards_of_ranks(self, shards: list[ray.ObjectRef]) -> list[ray.ObjectRef]:
        numbers = [self.launch.shard_of_rank(self.config, rank) for rank in range(len(self.ranks))]
        assert set(numbers) == set(range(len(shards))), f"{len(shards)} shards for the ranks' {sorted(set(numbers))}"
        return [shards[number] for number in numbers]

    async def save(self, rollout_id: int) -> None:
        """Write this rank's part of the checkpoint of `rollout_id` (the marker is the caller's)."""
        await self._all("save", rollout_id)

    async def export_hf(self, rollout_id: int) -> None:
        """Write the weights as a Hugging Face checkpoint under --save-hf."""
        await self._all("export_hf", rollout_id)

    async def move(self, moves: Sequence[Move]) -> dict[str, float]:
        """Make moves of the planner on every rank; returns perf metrics, as the next verbs do."""
        return _added_up(await self._all("move", moves))

    async def sleep(self) -> dict[str, float]:
        """Move the trainer off the GPUs."""
        return _added_up(await self._all("sleep"))

    async def wake_up(self) -> dict[str, float]:
        """Bring the trainer back to the GPUs."""
        return _added_up(await self._all("wake_up"))

    async def offload_grad_buffer(self) -> dict[str, float]:
        """Drop the gradients ahead of the sleep."""
        return _added_up(await self._all("offload_grad_buffer"))

    async def clear_memory(self) -> dict[str, float]:
        """Give the allocators' cached memory back."""
        return _added_up(await self._all("clear_memory"))


class TrainGroup(RankGroup):
    """The actor's ranks. Arguments as for RankGroup."""

    name = "trainer"

    @property
    def _rank_class(self) -> str:
        return self.launch.actor

    async def train(
        self, rollout_id: int, shards: list[ray.ObjectRef], values: list[ray.ObjectRef | None] | None = None
    ) -> dict[str, float]:
        """Train on one rollout; returns train/*, rollout/* and perf/* metrics.

        Args:
            shards: an object reference a data-parallel rank.
            values: one a rank, of what its critic thinks of its shard; None without a critic.
        """
        own = self._shards_of_ranks(shards)
        per_rank = [(shard,) for shard in own] if values is None else list(zip(own, values, strict=True))
        return _merged(await self._all("train", rollout_id, per_rank=per_rank))


class CriticGroup(RankGroup):
    """The critic's ranks, in the actor's layout. Arguments as for RankGroup."""

    name = "critic"

    def __init__(self, config: RunConfig, rank_options: list[dict], nodes: list[str]):
        super().__init__(critic_config(config), rank_options, nodes)

    @property
    def _rank_class(self) -> str:
        return self.launch.critic

    async def train(
        self, rollout_id: int, shards: list[ray.ObjectRef]
    ) -> tuple[dict[str, float], list[ray.ObjectRef | None]]:
        """Train on one rollout; returns critic-train/* and perf/* metrics, and a reference to each rank's values."""
        per_rank = [(shard,) for shard in self._shards_of_ranks(shards)]
        results = await self._all("train", rollout_id, per_rank=per_rank)
        return _merged([metrics for metrics, _ in results]), [values for _, values in results]


def critic_config(config: RunConfig) -> RunConfig:
    """The configuration as the critic's ranks read it: of their checkpoints they take that of the actor's rollout.

    Beside an actor that starts anew they take the newest.
    """
    load, step = config.critic_load, config.ckpt_step
    if load is not None and step is None:
        found = find_checkpoint(load, None)
        load, step = (None, None) if found is None else (load, found[0])
    # What the user gave of the critic's own.
    given = config.given - {"lr", "lr_warmup_iters", "lr_warmup_fraction"}
    if not config.given.isdisjoint(("critic_lr", "lr")):
        given |= {"lr"}
    if "critic_lr_warmup_iters" in config.given:
        given |= {"lr_warmup_iters"}
    return config.model_copy(
        update={
            "lr": config.critic_lr,
            "lr_warmup_iters": config.critic_lr_warmup_iters,
            "lr_warmup_fraction": None,
            "load": load,
            "ckpt_step": None if load is None else step,
            "save": config.critic_save,
            "save_hf": None,
            "keep_old_actor": False,
        }
    ).with_given(given)


def _added_up(results: list[dict[str, float]]) -> dict[str, float]:
    """One number from those of all ranks: of times the longest, of bytes the sum."""
    names = {name for result in results for name in result}
    return {
        name: (max if name.endswith("_time") else sum)(result[name] for result in results if name in result)
        for name in sorted(names)
    }


def _merged(results: list[dict[str, float]]) -> dict[str, float]:
    """Ranks report disjoint metrics; most report none."""
    merged: dict[str, float] = {}
    for result in results:
        assert not merged.keys() & result.keys(), f"two ranks report {merged.keys() & result.keys()}"
        merged.update(result)
    return merged
