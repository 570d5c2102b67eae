"""The planner: what moves between GPU, host and disk at each point of a run, as data.

`plan(phase, policy)` is a pure function; `miles.residency.executor` turns its steps into calls. The tables of
docs/advanced/colocate.md are what it returns, in words.

Two modes differ in their order only. With peak device `cpu` each side leaves before the other comes, so the GPU never
holds both. With `gpu` the other side comes before this one has left: the overlap is on the GPU, and the host is spared.
The weight sync reads the trainer's weights where they are (on the GPU, in the host copy, on disk, or from the masters),
so it never has to wake the trainer. Where it gathers them from several ranks it needs the actor's process groups, which
stay through the sleep and leave right after the sync: every region leaves and returns exactly once a step.

A critic takes its turn before the actor, on the same GPUs: in a step each of them comes and leaves once. In those steps
at a run's start that train the critic alone the actor stays away.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from miles.utils.errors import UserError


class Party(StrEnum):
    """Who owns memory on the shared GPUs."""

    ACTOR = "actor"
    CRITIC = "critic"
    ENGINE = "engine"


class Region(StrEnum):
    """What moves as a whole. `optimizer`: masters and moments; `comm`: the trainer's sub process groups."""

    WEIGHTS = "weights"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    COMM = "comm"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


class Place(StrEnum):
    """Where a region is. `dropped`: nowhere; it is rebuilt or written anew when it comes back."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    DROPPED = "dropped"


class Phase(StrEnum):
    """The points of a run at which memory may move, or must be where it is needed."""

    ENGINES_UP = "engines_up"
    TRAINER_BUILT = "trainer_built"
    CRITIC_BUILT = "critic_built"
    FIRST_SYNC = "first_sync"
    AFTER_GENERATE = "after_generate"
    BEFORE_CRITIC_SAVE = "before_critic_save"
    AFTER_CRITIC = "after_critic"
    AFTER_CRITIC_ONLY = "after_critic_only"
    BEFORE_SAVE = "before_save"
    AFTER_TRAIN = "after_train"


ENGINE_REGIONS = (Region.CUDA_GRAPH, Region.KV_CACHE, Region.WEIGHTS)
TRAINER_REGIONS = (Region.COMM, Region.GRADS, Region.WEIGHTS, Region.OPTIMIZER)


@dataclass(frozen=True)
class Policy:
    """What decides over the moves of a run.

    Args:
        offload_train: the trainer leaves the GPU while engines generate.
        offload_rollout: the engines leave the GPU while the trainer computes.
        levels: what of the engines may leave besides the CUDA graph, which always does: kv_cache, weights.
        target: where the trainer's weights and optimizer go: host or disk.
        peak_device: which device may hold both sides for a moment.
        critic: there is a critic on the same GPUs.
        lora: only adapters are trained.
        rematerialize: the trainer's weights are dropped, and rebuilt from the optimizer's masters.
        stream_optimizer: the optimizer is on disk within the step too.
        sync_gathers: the weight sync uses the actor's sub process groups, which then leave after it.
    """

    offload_train: bool
    offload_rollout: bool
    levels: frozenset[Region]
    target: Place
    peak_device: Literal["cpu", "gpu"]
    critic: bool = False
    lora: bool = False
    rematerialize: bool = False
    stream_optimizer: bool = False
    sync_gathers: bool = False

    def __post_init__(self) -> None:
        assert self.levels <= {Region.KV_CACHE, Region.WEIGHTS}, f"not levels: {self.levels}"
        assert self.target in (Place.HOST, Place.DISK), f"not a target: {self.target}"
        assert self.peak_device in ("cpu", "gpu"), f"not a peak device: {self.peak_device}"

    def problems(self) -> list[str]:
        """Why the combination is illegal, a sentence a reason, in the names of the flags; empty if it is legal."""
        gpu_peak = "--colocate-memory-peak-device gpu"
        disk_target = "--offload-train-target disk"
        rebuild, stream = "--rematerialize-param-from-master-weight", "--stream-optimizer-state-to-disk"
        disk = self.target == Place.DISK
        rules = [
            (
                self.peak_device == "gpu" and not (self.offload_train and self.offload_rollout),
                f"{gpu_peak} interleaves the moves of both sides: it needs --offload-train and --offload-rollout",
            ),
            (
                self.peak_device == "gpu" and self.critic,
                f"{gpu_peak} does not work with a critic, which would be a third party on the GPU: use cpu",
            ),
            (
                disk and not self.offload_train,
                f"{disk_target} says where the sleeping trainer goes: it needs --offload-train",
            ),
            (
                self.rematerialize and not self.offload_train,
                f"{rebuild} saves bytes when the trainer sleeps: it needs --offload-train",
            ),
            (
                self.rematerialize and self.lora,
                f"{rebuild} does not work with LoRA: the frozen base weights have no masters to be rebuilt from",
            ),
            (
                self.rematerialize and disk,
                f"{rebuild} does not work with {disk_target}: the weight sync would read the masters, twice the "
                "bytes, from disk; use --offload-train-target cpu",
            ),
            (
                self.rematerialize and self.stream_optimizer,
                f"{rebuild} does not work with {stream}: the masters are on disk when the weights are rebuilt",
            ),
            (
                self.stream_optimizer and self.lora,
                f"{stream} does not work with LoRA: the adapters' optimizer is too small to be worth a disk",
            ),
        ]
        return [reason for broken, reason in rules if broken]

    def more_room_on_the_gpu(self) -> str:
        """What else to do where the trainer finds no room on the GPU: what is legal here and not done yet."""
        kept = {Region.KV_CACHE, Region.WEIGHTS} - self.levels
        ways = []
        if self.peak_device == "gpu":
            ways.append("set --colocate-memory-peak-device cpu, where the engines' weights leave before it comes")
            kept.discard(Region.WEIGHTS)  # with it they would be there too
        if not self.offload_rollout:
            ways.append("add --offload-rollout")
        elif kept:
            ways.append("let more of the engines leave with --offload-rollout-level kv_cache weight")
        if self._may_stream:
            ways.append("keep its optimizer on disk with --stream-optimizer-state-to-disk")
        return ", or ".join([*ways, "give it more GPUs"])

    def less_on_the_host(self) -> str:
        """What to do where the host has no room for the sleeping trainer: what is legal here and not done yet."""
        rebuild = "--rematerialize-param-from-master-weight"
        if self.rematerialize:
            return f"let it wait on disk, with --offload-train-target disk and without {rebuild}"
        ways = ["--offload-train-target disk"]
        if self._may_stream:
            ways += [f"--bf16 {rebuild}", "--stream-optimizer-state-to-disk"]
        return f"let less of it stay on the host with {' or '.join(ways)}"

    @property
    def _may_stream(self) -> bool:
        return not (self.stream_optimizer or self.rematerialize or self.lora)


@dataclass(frozen=True)
class Move:
    """One region changes its place."""

    party: Party
    region: Region
    source: Place
    target: Place

    @property
    def leaves(self) -> bool:
        """Away from the GPU."""
        return self.source == Place.GPU

    def reversed(self) -> "Move":
        """The way back."""
        return Move(self.party, self.region, self.target, self.source)


@dataclass(frozen=True)
class Clear:
    """The party's allocator caches are emptied: what they hold of the GPU is free for others."""

    party: Party


@dataclass(frozen=True)
class Sync:
    """The trainer's weights are written into the engines', which may be read from then on."""


Step = Move | Clear | Sync


@functools.cache
def plan(phase: Phase, policy: Policy) -> tuple[Step, ...]:
    """What has to be done at `phase`, in order.

    Raises:
        ValueError: the policy is illegal; the message is its problems.
    """
    if problems := policy.problems():
        raise UserError("; ".join(problems))
    overlap_on_gpu = policy.peak_device == "gpu"
    pools_leave = engine_leaves(policy, Region.CUDA_GRAPH, Region.KV_CACHE)
    weights_leave = engine_leaves(policy, Region.WEIGHTS)
    actor_leaves, actor_returns = trainer_leaves(Party.ACTOR, policy), trainer_returns(Party.ACTOR, policy)
    critic_leaves = trainer_leaves(Party.CRITIC, policy) if policy.critic else ()
    match phase:
        case Phase.ENGINES_UP:
            return pools_leave if overlap_on_gpu else pools_leave + weights_leave
        case Phase.TRAINER_BUILT:
            return actor_leaves
        case Phase.CRITIC_BUILT:
            return critic_leaves
        case Phase.FIRST_SYNC if overlap_on_gpu:
            return _sync(policy) + back(pools_leave)
        case Phase.FIRST_SYNC:
            return _caches(policy) + back(weights_leave) + _sync(policy) + back(pools_leave)
        case Phase.AFTER_GENERATE if overlap_on_gpu:
            return pools_leave + actor_returns + weights_leave
        case Phase.AFTER_GENERATE:
            first_returns = trainer_returns(Party.CRITIC, policy) if policy.critic else actor_returns
            return pools_leave + weights_leave + first_returns
        case Phase.AFTER_CRITIC:
            return critic_leaves + actor_returns if policy.critic else ()
        case Phase.AFTER_CRITIC_ONLY if not policy.critic:
            return ()
        case Phase.AFTER_CRITIC_ONLY if weights_leave:
            # The sleeping actor sends what it has; where that takes its groups, they come for it alone.
            groups_return = back(leaves_after_sync(Party.ACTOR, policy))
            return critic_leaves + groups_return + plan(Phase.FIRST_SYNC, policy)
        case Phase.AFTER_CRITIC_ONLY:
            # The engines kept their weights, and the actor has no others.
            return critic_leaves + _caches(policy) + back(pools_leave)
        case Phase.AFTER_TRAIN if overlap_on_gpu:
            # With LoRA the gradients are a tag of their own: they make room for the engine's weights.
            early = tuple(move for move in actor_leaves if policy.lora and move.region == Region.GRADS)
            late = tuple(move for move in actor_leaves if move not in early)
            caches = (Clear(Party.ACTOR),)
            return caches + early + back(weights_leave) + late + _sync(policy) + back(pools_leave)
        case Phase.AFTER_TRAIN:
            return actor_leaves + plan(Phase.FIRST_SYNC, policy)
        case Phase.BEFORE_CRITIC_SAVE | Phase.BEFORE_SAVE:
            return ()


def needs(phase: Phase, policy: Policy) -> frozenset[tuple[Party, Region]]:
    """What must be on the GPU once the plan of `phase` has run."""
    match phase:
        case Phase.FIRST_SYNC | Phase.AFTER_TRAIN | Phase.AFTER_CRITIC_ONLY:
            return frozenset((Party.ENGINE, region) for region in ENGINE_REGIONS)
        case Phase.AFTER_GENERATE | Phase.AFTER_CRITIC:
            party = Party.CRITIC if policy.critic and phase == Phase.AFTER_GENERATE else Party.ACTOR
            return frozenset((party, region) for region in _moving_regions(policy))
        case Phase.BEFORE_CRITIC_SAVE if not policy.critic:
            return frozenset()
        case Phase.BEFORE_CRITIC_SAVE | Phase.BEFORE_SAVE:
            # Gradients are not saved.
            party = Party.CRITIC if phase == Phase.BEFORE_CRITIC_SAVE else Party.ACTOR
            return frozenset((party, region) for region in _moving_regions(policy) if region != Region.GRADS)
        case Phase.ENGINES_UP | Phase.TRAINER_BUILT | Phase.CRITIC_BUILT:
            return frozenset()


def trainer_leaves(party: Party, policy: Policy) -> tuple[Move, ...]:
    """What a full sleep of `party` (actor or critic) moves, in order; nothing without --offload-train.

    Groups that the weight sync needs are not among it: they leave after the sync.
    """
    if not policy.offload_train:
        return ()
    late = {move.region for move in leaves_after_sync(party, policy)}
    order = tuple(region for region in _moving_regions(policy) if region not in late)
    if policy.rematerialize:
        # Coming back, reversed: the masters and the groups are there when the weights are rebuilt from them.
        order = (Region.WEIGHTS, *(region for region in order if region != Region.WEIGHTS))
    if policy.lora:
        order = (Region.GRADS, *(region for region in order if region != Region.GRADS))
    targets = {
        Region.COMM: Place.DROPPED,
        Region.GRADS: Place.DROPPED,
        Region.WEIGHTS: Place.DROPPED if policy.rematerialize else policy.target,
        Region.OPTIMIZER: policy.target,
    }
    return tuple(Move(party, region, Place.GPU, targets[region]) for region in order)


def trainer_returns(party: Party, policy: Policy) -> tuple[Move, ...]:
    """What a full wake-up of `party` moves: the mirror image of its sleep and of what left after the sync."""
    return back(trainer_leaves(party, policy) + leaves_after_sync(party, policy))


def leaves_after_sync(party: Party, policy: Policy) -> tuple[Move, ...]:
    """What of `party` outlasts its sleep: the actor's process groups, where the sync gathers over them."""
    if party == Party.ACTOR and policy.offload_train and policy.sync_gathers:
        return (Move(party, Region.COMM, Place.GPU, Place.DROPPED),)
    return ()


def engine_leaves(policy: Policy, *regions: Region) -> tuple[Move, ...]:
    """Those of `regions` that may leave. None of them takes a copy along: the sync writes the weights anew."""
    may_leave = {Region.CUDA_GRAPH, *policy.levels} if policy.offload_rollout else set()
    return tuple(Move(Party.ENGINE, region, Place.GPU, Place.DROPPED) for region in regions if region in may_leave)


def back(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The way back: each of `moves` reversed, the last one first."""
    return tuple(move.reversed() for move in reversed(tuple(moves)))


def start(policy: Policy) -> dict[tuple[Party, Region], Place]:
    """Where everything is right after it was built."""
    parties = (Party.ACTOR, Party.CRITIC) if policy.critic else (Party.ACTOR,)
    places = {(Party.ENGINE, region): Place.GPU for region in ENGINE_REGIONS}
    places |= {(party, region): Place.GPU for party in parties for region in TRAINER_REGIONS}
    if policy.stream_optimizer:
        places |= {(party, Region.OPTIMIZER): Place.DISK for party in parties}
    return places


def _moving_regions(policy: Policy) -> tuple[Region, ...]:
    """A trainer's regions that are on the GPU while it computes."""
    return tuple(r for r in TRAINER_REGIONS if not (r == Region.OPTIMIZER and policy.stream_optimizer))


def _caches(policy: Policy) -> tuple[Step, ...]:
    """A trainer that stays still lets go of its caches, or the engine's pool does not fit. A sleep does so too."""
    if policy.offload_train or not policy.offload_rollout:
        return ()
    return (Clear(Party.ACTOR), Clear(Party.CRITIC)) if policy.critic else (Clear(Party.ACTOR),)


def _sync(policy: Policy) -> tuple[Step, ...]:
    """The weight sync, and the end of the process groups that were kept for it."""
    return (Sync(), *leaves_after_sync(Party.ACTOR, policy))
