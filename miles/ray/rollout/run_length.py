"""How many rollouts a run has, and how long a sample may be."""

import logging

from miles.config import RunConfig
from miles.rollout.prompts.data_source import DataSource, errors_of_source
from miles.utils.errors import UserError

logger = logging.getLogger(__name__)


def with_num_rollout(config: RunConfig, prompts_per_epoch: int) -> RunConfig:
    """The configuration with `num_rollout` set, which `--num-epoch` leaves open until the prompts are counted.

    A rollout goes on into the next epoch, so that prompts are left over at the end of the run alone: a warning says
    how many.

    Raises:
        ValueError: there is nothing to train in that many rollouts.
    """
    if config.num_rollout is not None:
        return config
    assert config.num_epoch is not None, "the configuration has one of --num-rollout and --num-epoch"
    prompts = config.num_epoch * prompts_per_epoch
    num_rollout, left_over = divmod(prompts, config.rollout_batch_size)
    if num_rollout == 0:
        raise UserError(
            f"--num-epoch {config.num_epoch} of {prompts_per_epoch} prompts is {prompts} prompts, fewer than one "
            f"rollout takes: lower --rollout-batch-size {config.rollout_batch_size}, or give --num-rollout instead"
        )
    if left_over:
        logger.warning(
            "--num-epoch %d of %d prompts is %d prompts, of which the run's %d rollouts of --rollout-batch-size %d "
            "train on %d: the last %d are left over; give --num-rollout %d instead to train on them too",
            config.num_epoch,
            prompts_per_epoch,
            prompts,
            num_rollout,
            config.rollout_batch_size,
            prompts - left_over,
            left_over,
            num_rollout + 1,
        )
    if config.use_critic and config.num_critic_only_steps >= num_rollout:
        raise UserError(
            f"--num-critic-only-steps {config.num_critic_only_steps} leaves none of the {num_rollout} rollouts of "
            f"--num-epoch {config.num_epoch} to the actor; give at most {num_rollout - 1}"
        )
    return config.model_copy(update={"num_rollout": num_rollout})


def longest_sample(config: RunConfig, data: DataSource) -> int:
    """Tokens of prompt and response that a sample may have, where engines run."""
    assert config.rollout_max_response_len is not None, "a rule asks for it"
    with errors_of_source(config):
        longest = data.longest_prompt + config.rollout_max_response_len
    if config.custom_generate_function_path is not None:
        # What tools say comes on top of the response.
        return config.rollout_max_context_len or longest
    return min(longest, config.rollout_max_context_len or longest)
