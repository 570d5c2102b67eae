"""Where a run starts: the checkpoint that it goes on from, and whether anything is left to do."""

import logging

from miles.config import RunConfig
from miles.utils.checkpoint_folder import MANIFEST, REFERENCE, find_checkpoint, locate, newest_step

logger = logging.getLogger(__name__)


def resumed(config: RunConfig) -> RunConfig:
    """The configuration with its checkpoint found: `load` and `ckpt_step` name a whole one, or are both None.

    `critic_load` holds one of the same rollout, or is None. Looked for once, here, so that all ranks take the same.

    Raises:
        ValueError: --ckpt-step, or every checkpoint of --load, is not whole or lacks the critic's part.
    """
    if not config.needs_trainer or config.load is None:
        return config.model_copy(update={"load": None, "ckpt_step": None})
    critic = config.critic_load if config.use_critic else None
    has_critic = critic is not None and newest_step(critic) is not None
    checkpoint = find_checkpoint(config.load, config.ckpt_step, critic if has_critic else None)
    if checkpoint is None:
        logger.info("no checkpoint in %s: a new run", config.load)
        return config.model_copy(update={"load": None})
    step, folder = checkpoint
    if critic is not None and not has_critic:
        logger.warning("no checkpoint in %s: beside the actor of %s the critic is a new one", critic, folder)
        critic = None
    interval = config.ref_update_interval
    moved = interval is not None and step + 1 >= interval
    if moved and not (folder / MANIFEST).exists() and not (folder / REFERENCE).is_dir():
        logger.warning(
            "%s is of a version that kept no list of its files, and has no %s/: the reference is that of --ref-load %s",
            folder,
            REFERENCE,
            config.ref_load,
        )
    return config.model_copy(update={"ckpt_step": step, "critic_load": critic})


def first_rollout(config: RunConfig) -> int:
    """The rollout that a `resumed` run starts with: --start-rollout-id, else the one after the checkpoint's."""
    if config.start_rollout_id is not None:
        return config.start_rollout_id
    return 0 if config.ckpt_step is None else config.ckpt_step + 1


def nothing_left(config: RunConfig) -> str | None:
    """Why a `resumed` run has nothing to do; None where it has, or its number of rollouts is not known yet."""
    count, first = config.num_rollout, first_rollout(config)
    if not count or first < count:
        return None
    if config.start_rollout_id is not None:
        return f"nothing to do: --start-rollout-id {first} is behind the last of {count} rollouts, {count - 1}"
    assert config.load is not None and config.ckpt_step is not None, "else rollout 0 would be the first"
    return (
        f"nothing to do: this run of {count} rollouts is finished, {locate(config.load, config.ckpt_step)} is its "
        "last checkpoint; raise --num-rollout or --num-epoch to go on, or leave out --load to begin anew"
    )
