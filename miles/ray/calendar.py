"""The calendar of a run: what is due at each of its rollouts."""

from dataclasses import dataclass

from miles.config import RunConfig


@dataclass(frozen=True)
class Due:
    """What happens at one rollout besides its generation.

    Attributes:
        actor_training: the actor learns from it; not so in a run's first --num-critic-only-steps.
        save: it is followed by a checkpoint, or an export of --save-hf.
        evaluation: it is followed by an evaluation.
        sync: after it the engines get the actor's weights. What is saved or evaluated is synced, whatever the interval.
        next_rollout: the run has a rollout after it.
    """

    actor_training: bool
    save: bool
    evaluation: bool
    sync: bool
    next_rollout: bool


def due(config: RunConfig, rollout_id: int) -> Due:
    """What is due at `rollout_id`, counted from 0 over all resumptions of the run.

    Args:
        config: the run's configuration, with num_rollout set.
    """
    count = rollout_id + 1
    last = count == config.num_rollout

    def reached(interval: int | None) -> bool:
        return interval is not None and count % interval == 0

    save = (config.save is not None or config.save_hf is not None) and (last or reached(config.save_interval))
    evaluation = config.eval_interval is not None and (last or reached(config.eval_interval))
    return Due(
        actor_training=not config.use_critic or rollout_id >= config.num_critic_only_steps,
        save=save,
        evaluation=evaluation,
        sync=reached(config.update_weights_interval) or save or evaluation,
        next_rollout=not last,
    )


def rollouts(config: RunConfig, first_rollout: int) -> range:
    """The rollouts of this process, from `first_rollout` to the run's last; num_rollout is set by then."""
    assert config.num_rollout is not None, "--num-epoch leaves it open until the prompts are counted"
    return range(first_rollout, config.num_rollout)


def is_evaluated_first(config: RunConfig, first_rollout: int) -> bool:
    """Whether the run is evaluated before anything is trained: a new one with --eval-interval."""
    return config.eval_interval is not None and not config.skip_eval_before_train and first_rollout == 0
