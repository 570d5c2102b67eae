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
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.distributed.checkpoint import CheckpointException

from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.sharded_writer import write_sharded
from miles.backends.megatron_utils.torch_adam import fill_states, megatron_optimizers
from miles.config import RunConfig
from miles.config.continued import continued, settings_without_names
from miles.utils.agreement import Agreement
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


def continued_config(folder: Path, config: RunConfig) -> RunConfig:
    """`config` with the optimizer's settings of the checkpoint in `folder` where the user gave none.

    Says where the two differ. Raises ValueError where they do not go together.
    """
    saved = dist_checkpointing.load_common_state_dict(str(folder / MODEL))
    if "optimizer" not in saved:
        return config  # `load` says so
    if "settings" in saved:
        settings = saved["settings"]
    else:
        group = _torch_states(saved["optimizer"])[0]["param_groups"][0]
        settings = settings_without_names(saved["scheduler"], group)
    config, differences = continued(config, settings)
    for sentence in differences if dist.get_rank() == 0 else []:
        logger.info("going on from %s: %s", folder, sentence)
    return config


def load(folder: Path, state: TrainState, with_optimizer: bool) -> None:
    """Load the checkpoint in `folder`, saved under any parallel sizes.

    Of optimizer and schedule it takes moments and counts of steps: what they are set to is what `state` was built with
    (see `continued_config`). Random state is restored when the number of ranks is the one it was saved with.
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
