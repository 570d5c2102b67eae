"""The critic, for an estimator that has one."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.names import flag_of
from miles.config.paths import LoadFolder, OutputFolder
from miles.config.section import Derived, Section, derives, rule
from miles.config.values import Values
from miles.training.advantages import estimators_where

WITH_CRITIC = OnlyWith(f"--advantage-estimator {estimators_where(lambda e: e.critic, ' or ')}")


class CriticConfig(Section):
    title: ClassVar[str] = "Critic"

    num_critic_only_steps: Annotated[int, WITH_CRITIC] = Field(
        0, ge=0, description="Rollouts at the start of a run that train the critic alone."
    )
    critic_load: Annotated[LoadFolder | None, WITH_CRITIC] = Field(
        None,
        description="Folder of the critic's checkpoints to resume from. Unset: with --load, that and _critic. A new "
        "critic starts from --hf-checkpoint with values of zero.",
    )
    critic_save: Annotated[OutputFolder | None, WITH_CRITIC, OnlyWith("--save", where=lambda v: v.use_critic)] = Field(
        None, description="Folder that the critic's checkpoints are written to. Unset: with --save, that and _critic."
    )
    critic_lr: Annotated[float | None, WITH_CRITIC] = Field(
        None, ge=0, description="The critic's learning rate. Unset: --lr."
    )
    critic_lr_warmup_iters: Annotated[int, WITH_CRITIC] = Field(
        0, ge=0, description="Optimizer steps of the critic's own linear warm-up."
    )
    value_clip: Annotated[float, WITH_CRITIC] = Field(
        0.2, gt=0, description="A value's loss is clipped where it moves by more than this from that before the step."
    )


@derives("critic_lr", "critic_load", "critic_save")
def _as_the_actor(v: Values) -> Iterator[Derived]:
    if not v.use_critic:
        return
    if v.critic_lr is None:
        yield "critic_lr", v.lr, "--lr"
    for name in ("load", "save"):
        folder = getattr(v, name)
        if getattr(v, f"critic_{name}") is None and folder is not None:
            yield f"critic_{name}", folder + "_critic", f"--{name} and _critic"


@rule
def _beside_the_actor(v: Values) -> Iterator[str]:
    if not v.use_critic:
        return
    if v.num_rollout is not None and v.num_critic_only_steps >= v.num_rollout:
        yield (
            f"--num-critic-only-steps {v.num_critic_only_steps} leaves none of --num-rollout {v.num_rollout} to the "
            f"actor; give at most {v.num_rollout - 1}"
        )
    for name in ("critic_load", "critic_save"):
        folder, of_actor = getattr(v, name), getattr(v, name.removeprefix("critic_"))
        if folder is not None and folder == of_actor:
            yield (
                f"{flag_of(name)} {folder} is the actor's folder too, and their checkpoints have the same names; "
                "choose another"
            )


@rule
def _schedule(v: Values) -> Iterator[str]:
    if not v.use_critic:
        return
    if v.min_lr > v.critic_lr:
        yield f"--min-lr {v.min_lr} must not be above --critic-lr {v.critic_lr}: it bounds the decay of both"
    if v.lr_warmup_init > v.critic_lr:
        yield f"--lr-warmup-init {v.lr_warmup_init} must not be above --critic-lr {v.critic_lr}: both start with it"
    if v.lr_decay_iters is not None and v.critic_lr_warmup_iters >= v.lr_decay_iters:
        yield (
            f"--critic-lr-warmup-iters {v.critic_lr_warmup_iters} must be less than --lr-decay-iters {v.lr_decay_iters}"
        )
