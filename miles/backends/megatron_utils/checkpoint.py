"""Megatron's part of a checkpoint: model, optimizer and schedule, in its resharding format."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.distributed.checkpoint import CheckpointException

from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.sharded_writer import write_sharded
from miles.backends.megatron_utils.torch_adam import fill_states, megatron_optimizers
from miles.config.continued import settings_without_names
from miles.utils.checkpoint_folder import MODEL
from miles.utils.errors import UserError

logger = logging.getLogger(__name__)

# What can be loaded under other parallel sizes than it was saved under. Layers may differ, so each has its own keys.
_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def save(folder: Path, state: TrainState, with_optimizer: bool) -> None:
    """Write this rank's part of model, optimizer and schedule below `folder / MODEL`. All ranks call it together."""
    write_sharded(folder / MODEL, _sharded_state(state, with_optimizer, is_loading=False), _METADATA)


def saved_settings(folder: Path) -> dict[str, Any] | None:
    """The optimizer's settings in the checkpoint in `folder`; None where it has no optimizer's state."""
    saved = dist_checkpointing.load_common_state_dict(str(folder / MODEL))
    if "optimizer" not in saved:
        return None
    if "settings" in saved:
        return saved["settings"]
    group = _torch_states(saved["optimizer"])[0]["param_groups"][0]
    return settings_without_names(saved["scheduler"], group)


def load(folder: Path, state: TrainState, with_optimizer: bool) -> None:
    """Load the checkpoint in `folder`, saved under any parallel sizes.

    Of optimizer and schedule it takes moments and counts of steps: what they are set to is what `state` was built with.
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
        now = state.optimizer.config
        for inner in _torch_states(loaded["optimizer"]):
            for group in inner["param_groups"]:
                # Megatron knows a group by its rates, and would take the rest from the checkpoint.
                group |= {"max_lr": now.lr, "min_lr": now.min_lr}
                group |= {"betas": (now.adam_beta1, now.adam_beta2), "eps": now.adam_eps}
            if "state" in inner:
                # A plain optimizer's count of steps, which Megatron leaves out while it is 0.
                inner["state"].setdefault("common_step", torch.tensor(0.0))
        state.optimizer.load_state_dict(loaded["optimizer"])
        _say_where_decay_ends(folder, loaded["scheduler"], state.scheduler.state_dict())
        # The rest of the schedule is that of `state`. This puts its rate and weight decay into the optimizer, too.
        state.scheduler.num_steps = 0
        state.scheduler.step(increment=loaded["scheduler"]["num_steps"])
    else:
        state.optimizer.reload_model_params()


def is_of_critic(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is that of a critic: it has a value head in the place of the output layer."""
    saved = dist_checkpointing.load_tensors_metadata(str(folder / MODEL))
    return "output_layer.bias" in saved


def save_weights(folder: Path, state: TrainState) -> None:
    """Write the model's weights as they are now, without anything else, to `folder`. All ranks call it together."""
    write_sharded(folder, _sharded_state(state, with_optimizer=False, is_loading=False), _METADATA)


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
    parts, own = _parts(saved["optimizer"]), megatron_optimizers(state.optimizer)
    before, now = _kind_of_saved(parts[0]), _kind(own[0])
    # That of the experts, where they are shared out, is one of its own.
    if len(parts) != len(own):
        above, one = "--expert-model-parallel-size above 1", "--expert-model-parallel-size 1"
        before, now = (above, one) if len(parts) > 1 else (one, above)
    if before != now:
        raise UserError(
            f"{folder} was saved with {before} and this run has {now}: optimizer state does not go from one to the "
            "other; keep to it, or pass --no-load-optim to continue with a fresh optimizer"
        )


def _kind(optimizer: MegatronOptimizer) -> str:
    """The flags that decide how the optimizer's state is kept."""
    if isinstance(optimizer, DistributedOptimizer):
        return "--use-distributed-optimizer"
    masters = isinstance(optimizer, Float16OptimizerWithFloat16Params)
    return "--no-use-distributed-optimizer and " + ("--bf16" if masters else "--no-bf16")


def _kind_of_saved(part: dict) -> str:
    if "param_state_sharding_type" in part:
        return "--use-distributed-optimizer"
    return "--no-use-distributed-optimizer and " + ("--bf16" if "optimizer" in part else "--no-bf16")


def _say_where_decay_ends(folder: Path, before: dict, now: dict) -> None:
    still = now["lr_decay_style"] == now["wd_incr_style"] == "constant"
    if before["lr_decay_steps"] != now["lr_decay_steps"] and not still and dist.get_rank() == 0:
        what = "going on from %s: the decay ends after %d optimizer steps, not after %d"
        logger.info(what, folder, now["lr_decay_steps"], before["lr_decay_steps"])


def _parts(optimizer: dict) -> list[dict]:
    """Those of a checkpoint's chained optimizer, or itself. Several are numbered."""
    return [part for key, part in optimizer.items() if isinstance(key, int)] or [optimizer]


def _torch_states(optimizer: dict) -> list[dict]:
    """The state of each torch optimizer in a checkpoint's: `param_groups`, and `state` of a plain one."""
    return [part.get("optimizer", part) for part in _parts(optimizer)]


def _sharded_state(state: TrainState, with_optimizer: bool, is_loading: bool) -> dict:
    metadata = dict(_METADATA)  # a copy: Megatron adds this world's process group to it
    result = {name: model.sharded_state_dict(metadata=metadata) for name, model in _named_models(state).items()}
    if with_optimizer:
        models = dict(result)
        if not is_loading:
            fill_states(state.optimizer)  # what a checkpoint lacks, because no step was taken yet, could not be loaded
        result["optimizer"] = state.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
        result["scheduler"] = state.scheduler.state_dict()
        result["settings"] = state.settings
    return result


def _named_models(state: TrainState) -> dict[str, GPTModel]:
    """The chunks by their keys in the state. Tensors have global names: these keys are not part of them."""
    return {f"model{number}": model for number, model in enumerate(state.models)}
