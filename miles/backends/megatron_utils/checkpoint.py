"""Checkpoints of the trainer: model, optimizer, schedule and random state, in Megatron's resharding format.

A rank writes into the folder of a checkpoint that is not finished yet; `miles.utils.checkpoint_folder` says what
belongs there, and the driver declares it whole.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import CheckpointException

from miles.backends.megatron_utils.agreement import Agreement
from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.sharded_writer import write_sharded
from miles.backends.megatron_utils.torch_adam import fill_states, megatron_optimizers
from miles.utils.checkpoint_folder import MODEL, begin_checkpoint, partial_folder, random_state_file
from miles.utils.disk import writing
from miles.utils.errors import UserError

logger = logging.getLogger(__name__)

# What can be loaded under other parallel sizes than it was saved under. Layers may differ, so each has its own keys.
_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def save(root: str, rollout_id: int, state: TrainState, with_optimizer: bool, agreement: Agreement) -> None:
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
        write_sharded(folder / MODEL, _sharded_state(state, with_optimizer, is_loading=False), _METADATA)
        with agreement.alone(what):
            torch.save(_rng_state(), folder / random_state_file(dist.get_rank(), dist.get_world_size()))


def load(folder: Path, state: TrainState, with_optimizer: bool) -> None:
    """Load the checkpoint in `folder`, saved under any parallel sizes.

    Random state is restored when the number of ranks is the one it was saved with.
    """
    model_folder = folder / MODEL
    if with_optimizer:
        _check_optimizer(folder, dist_checkpointing.load_common_state_dict(str(model_folder)), state)
    with causes():
        loaded = dist_checkpointing.load(
            _sharded_state(state, with_optimizer, is_loading=True),
            str(model_folder),
            strict=StrictHandling.RAISE_ALL if with_optimizer else StrictHandling.RAISE_UNEXPECTED,
        )
    for name, model in _named_models(state).items():
        model.load_state_dict(loaded[name], strict=True)
    if with_optimizer:
        for inner in _torch_states(loaded["optimizer"]):
            if "state" in inner:
                # A plain optimizer's count of steps, which Megatron leaves out while it is 0.
                inner["state"].setdefault("common_step", torch.tensor(0.0))
        state.optimizer.load_state_dict(loaded["optimizer"])
        state.scheduler.load_state_dict(loaded["scheduler"])
    else:
        state.optimizer.reload_model_params()
    rng_file = folder / random_state_file(dist.get_rank(), dist.get_world_size())
    if rng_file.exists():
        _set_rng_state(torch.load(rng_file, weights_only=True))
    else:
        logger.info("%s was saved by another number of ranks: random state starts from --seed", folder)


def is_of_critic(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is that of a critic: it has a value head in the place of the output layer."""
    saved = dist_checkpointing.load_tensors_metadata(str(folder / MODEL))
    return "output_layer.bias" in saved


def save_weights(folder: Path, state: TrainState, agreement: Agreement) -> None:
    """Write the model's weights as they are now, without anything else, to `folder`. All ranks call it together.

    Raises as `save`.
    """
    what = f"saving {folder}"
    with writing("--save", folder):
        with agreement.alone(what):
            if dist.get_rank() == 0:
                folder.mkdir(parents=True)
        write_sharded(folder, _sharded_state(state, with_optimizer=False, is_loading=False), _METADATA)
        agreement.check(what)


def load_weights(folder: Path, state: TrainState) -> None:
    """Load what `save_weights` wrote, under any parallel sizes, into the model. The optimizer is not touched."""
    with causes():
        loaded = dist_checkpointing.load(
            _sharded_state(state, with_optimizer=False, is_loading=True), str(folder), strict=StrictHandling.RAISE_ALL
        )
    for name, model in _named_models(state).items():
        model.load_state_dict(loaded[name], strict=True)


@contextlib.contextmanager
def causes() -> Iterator[None]:
    """torch gathers the failures of all ranks in an error that is no Exception: raises the first of them instead."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _check_optimizer(folder: Path, saved: dict, state: TrainState) -> None:
    if "optimizer" not in saved:
        raise UserError(
            f"{folder} holds no optimizer state (it was saved with --no-save-optim): pass --no-load-optim to continue "
            "with a fresh optimizer"
        )
    # That of the experts, where they are shared out, is one of its own.
    parts = len(_torch_states(saved["optimizer"]))
    if parts != len(megatron_optimizers(state.optimizer)):
        before, now = ("above 1", "1") if parts > 1 else ("1", "above 1")
        raise UserError(
            f"{folder} was saved with --expert-model-parallel-size {before} and that is {now} now: "
            "optimizer state does not go from one to the other; keep to it, or pass --no-load-optim to continue with a "
            "fresh optimizer"
        )


def _torch_states(optimizer: dict) -> list[dict]:
    """The state of each torch optimizer in a checkpoint's: `param_groups`, and `state` of a plain one."""
    # Several are numbered.
    parts = [part for key, part in optimizer.items() if isinstance(key, int)] or [optimizer]
    return [part.get("optimizer", part) for part in parts]


def _sharded_state(state: TrainState, with_optimizer: bool, is_loading: bool) -> dict:
    metadata = dict(_METADATA)  # a copy: Megatron adds this world's process group to it
    result = {name: model.sharded_state_dict(metadata=metadata) for name, model in _named_models(state).items()}
    if with_optimizer:
        models = dict(result)
        if not is_loading:
            fill_states(state.optimizer)  # what a checkpoint lacks, because no step was taken yet, could not be loaded
        result["optimizer"] = state.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
        result["scheduler"] = state.scheduler.state_dict()
    return result


def _named_models(state: TrainState) -> dict[str, torch.nn.Module]:
    """The chunks by their keys in the state. Tensors have global names: these keys are not part of them."""
    return {f"model{number}": model for number, model in enumerate(state.models)}


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
