"""How many rollouts a run has."""

from miles.config import RunConfig
from miles.utils.errors import UserError


def with_num_rollout(config: RunConfig, prompts_per_epoch: int) -> RunConfig:
    """The configuration with `num_rollout` set, which `--num-epoch` leaves open until the prompts are counted.

    Raises:
        ValueError: there is nothing to train in that many rollouts.
    """
    if config.num_rollout is not None:
        return config
    prompts = config.num_epoch * prompts_per_epoch
    num_rollout = prompts // config.rollout_batch_size
    if num_rollout == 0:
        raise UserError(
            f"--num-epoch {config.num_epoch} of {prompts_per_epoch} prompts is {prompts} prompts, fewer than one "
            f"rollout takes: lower --rollout-batch-size {config.rollout_batch_size}, or give --num-rollout instead"
        )
    if config.use_critic and config.num_critic_only_steps >= num_rollout:
        raise UserError(
            f"--num-critic-only-steps {config.num_critic_only_steps} leaves none of the {num_rollout} rollouts of "
            f"--num-epoch {config.num_epoch} to the actor; give at most {num_rollout - 1}"
        )
    return config.model_copy(update={"num_rollout": num_rollout})
