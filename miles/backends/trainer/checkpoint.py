"""Checkpoints of a trainer: what its model saves, and the random state of every rank.

A rank writes into the folder of a checkpoint that is not finished yet; `miles.utils.checkpoint_folder` says what
belongs there, and the driver declares it whole.
"""

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from miles.backends.trainer.protocol import TrainedModel
from miles.config import RunConfig
from miles.config.continued import continued
from miles.utils.agreement import Agreement
from miles.utils.checkpoint_folder import begin_checkpoint, partial_folder, random_state_file
from miles.utils.disk import writing

logger = logging.getLogger(__name__)


def save(root: str, rollout_id: int, model: TrainedModel, with_optimizer: bool, agreement: Agreement) -> None:
    """Write this rank's part of checkpoint `rollout_id` under `root`. All ranks call it together.

    Raises:
        ValueError: this rank could not write, with the folder and the bytes that are free there.
        AnotherRankFailed: another one could not.
    """
    folder = partial_folder(root, rollout_id)
    what = f"saving {folder}"
    with writing("--save", root):
        with agreement.alone(what):
            if dist.get_rank() == 0:
                begin_checkpoint(root, rollout_id)
        model.save_state(folder, with_optimizer)
        with agreement.alone(what):
            torch.save(_random_state(), folder / random_state_file(dist.get_rank(), dist.get_world_size()))


def save_weights(folder: Path, model: TrainedModel, agreement: Agreement) -> None:
    """Write the model's weights as they are now, without anything else, to `folder`. All ranks call it together.

    Raises as `save`.
    """
    what = f"saving {folder}"
    with writing("--save", folder):
        with agreement.alone(what):
            if dist.get_rank() == 0:
                folder.mkdir(parents=True)
        model.save_weights(folder)
        agreement.check(what)


def continued_config(folder: Path, model: TrainedModel) -> RunConfig:
    """The run's configuration, with the optimizer's settings of the checkpoint in `folder` where the user gave none.

    Says where the two differ.

    Raises:
        ValueError: they do not go together.
    """
    settings = model.saved_settings(folder)
    if settings is None:
        return model.config  # `load` says so
    config, differences = continued(model.config, settings)
    for sentence in differences if dist.get_rank() == 0 else []:
        logger.info("going on from %s: %s", folder, sentence)
    return config


def load(folder: Path, model: TrainedModel, *, with_optimizer: bool, with_random_state: bool) -> None:
    """Load the checkpoint in `folder`. Random state can be restored if as many ranks saved it.

    Raises:
        ValueError: see `TrainedModel.load_state`.
    """
    model.load_state(folder, with_optimizer)
    if not with_random_state:
        return
    random_file = folder / random_state_file(dist.get_rank(), dist.get_world_size())
    if random_file.exists():
        _set_random_state(torch.load(random_file, weights_only=True))
    else:
        logger.info("%s was saved by another number of ranks: random state starts from --seed", folder)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
