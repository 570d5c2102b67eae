"""Which flags would make a run fit: each is tried on the ledger; those that help stand in order of the step's time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.check.contents import work_of
from miles.check.ledger import Ledger, ledger_of
from miles.check.seconds import total_seconds
from miles.config import RunConfig
from miles.config.names import flag_of
from miles.config.section import written
from miles.config.validate import validate
from miles.config.values import Values
from miles.hf.shape import model_shape
from miles.utils.errors import UserError

SHOWN = 4
CHANGES_TOGETHER = 4
# What changes how the model is cut: only then it is counted anew.
LAYOUT = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "actor_num_nodes",
}


@dataclass(frozen=True)
class Remedy:
    """Flags that make the run fit, or nearly so.

    Args:
        missing: bytes that are still too much.
        slower: what a step takes then, by what it takes now, less 1; None where it can't take any now.
    """

    flags: str
    missing: float
    slower: float | None


def remedies(ledger: Ledger) -> list[Remedy]:
    """Best first: what fits with one change, by the time of a step. If nothing does, several changes together."""
    generates = ledger.engine is None or ledger.engine.tokens >= ledger.work.longest
    before = total_seconds(ledger) if generates else None
    tried = _tried(ledger)
    fitting = [(changes, result) for changes, result in tried if not result.shortages]
    if fitting:
        fitting.sort(key=lambda pair: total_seconds(pair[1]))
        return [_remedy(changes, result, before) for changes, result in fitting[:SHOWN]]
    together = _together(ledger, tried)
    return [_remedy(*together, before)] if together is not None else []


def _remedy(changes: dict[str, Any], ledger: Ledger, before: float | None) -> Remedy:
    slower = total_seconds(ledger) / before - 1 if before is not None else None
    return Remedy(flags_of(changes), missing_bytes(ledger), slower)


def missing_bytes(ledger: Ledger) -> float:
    """Of all shortages together."""
    return sum(shortage.missing for shortage in ledger.shortages)


def flags_of(changes: dict[str, Any]) -> str:
    """Changed fields as on a command line."""
    parts = []
    for name, value in changes.items():
        if name == "offload_train_disk_dir":
            parts.append(f"{flag_of(name)} FOLDER")
        elif name == "sglang":
            parts += [f"--sglang-{key.replace('_', '-')} {setting}" for key, setting in value.items()]
        elif value is not None:
            parts.append(written(name, value))
    return " ".join(parts)


def _together(ledger: Ledger, tried: list[tuple[dict, Ledger]]) -> tuple[dict[str, Any], Ledger] | None:
    """Again and again the change that leaves least missing, of these the one with the shortest step."""
    changes: dict[str, Any] = {}
    best = ledger
    for _ in range(CHANGES_TOGETHER):
        candidates = [(more, result) for more, result in tried if missing_bytes(result) < missing_bytes(best)]
        if not candidates:
            break
        more, best = min(candidates, key=lambda pair: (missing_bytes(pair[1]), total_seconds(pair[1])))
        changes |= more
        if not best.shortages:
            break
        tried = _tried(best)
    return (changes, best) if changes else None


def _tried(ledger: Ledger) -> list[tuple[dict[str, Any], Ledger]]:
    """Every change that is legal, with its ledger."""
    config, result = ledger.config, []
    for changes in _changes(config):
        update = dict(changes)
        if "sglang" in update:
            update["sglang"] = {**config.sglang, **update["sglang"]}
        changed = config.model_copy(update=update)
        if validate(Values(dict(changed))):
            continue
        try:
            same = ledger.model if LAYOUT.isdisjoint(changes) else None
            result.append((changes, ledger_of(changed, ledger.hardware, same)))
        except UserError:  # the model cannot have these parallel sizes
            continue
    return result


def _changes(config: RunConfig) -> Iterator[dict[str, Any]]:
    if config.needs_trainer:
        yield from changes_of_a_step(config)
        yield from _of_the_layout(config)
        yield from _of_the_optimizer(config)
    if config.needs_trainer and config.needs_engines and config.colocate:
        yield from _of_the_hand_over(config)
    if config.needs_engines and not config.rollout_external:
        yield {"rollout_num_gpus_per_engine": 2 * config.rollout_num_gpus_per_engine}
        for percent in (95, 93, 90, 85, 80, 70, 60, 50):
            yield {"sglang": {"mem_fraction_static": percent / 100}}


def changes_of_a_step(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Fewer activations."""
    if config.recompute_granularity != "full":
        again = {"recompute_granularity": "full", "recompute_modules": None}
        for layers in (4, 8, 16, 32):
            if layers < _layers_of_a_chunk(config):
                yield {**again, "recompute_method": "block", "recompute_num_layers": layers}
        yield {**again, "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is not None:
        half = config.max_tokens_per_gpu // 2
        # A sample stays whole.
        if half * config.context_parallel_size >= work_of(config).longest:
            yield {"max_tokens_per_gpu": half}
    elif config.micro_batch_size > 1:
        yield {"micro_batch_size": config.micro_batch_size // 2}
    if config.log_probs_chunk_size > 1024:
        yield {"log_probs_chunk_size": 1024}


def _layers_of_a_chunk(config: RunConfig) -> int:
    shape = model_shape(config.hf_checkpoint)
    assert shape is not None, "the ledger has read it"
    return shape["num_hidden_layers"] // (config.pipeline_model_parallel_size * (config.virtual_stages or 1))


def _of_the_layout(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Ranks that share more of the model."""
    tp, world = config.tensor_model_parallel_size, config.world_size
    for wider in (2 * tp, 4 * tp, 8 * tp):
        if wider <= config.actor_num_gpus_per_node:
            yield {"tensor_model_parallel_size": wider, "sequence_parallel": True}
    for name in ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        size = 2 * getattr(config, name)
        if world % size == 0:
            yield {name: size}
    nodes: dict[str, Any] = {"actor_num_nodes": 2 * config.actor_num_nodes}
    if config.colocate and config.rollout_num_gpus is not None:
        nodes["rollout_num_gpus"] = 2 * config.rollout_num_gpus
    yield nodes


def _of_the_optimizer(config: RunConfig) -> Iterator[dict[str, Any]]:
    folder = config.offload_train_disk_dir or str(Path.cwd())
    if not config.use_distributed_optimizer:
        yield {"use_distributed_optimizer": True}
    if not config.stream_optimizer_state_to_disk:
        yield {"stream_optimizer_state_to_disk": True, "offload_train_disk_dir": folder}
    if config.save is not None and not config.no_save_optim:
        yield {"no_save_optim": True}


def _of_the_hand_over(config: RunConfig) -> Iterator[dict[str, Any]]:
    folder = config.offload_train_disk_dir or str(Path.cwd())
    if not (config.offload_train and config.offload_rollout):
        yield {"offload_train": True, "offload_rollout": True, "offload_train_keep_host_buffers": True}
        return
    if set(config.offload_rollout_level) != {"kv_cache", "weight"}:
        yield {"offload_rollout_level": ["kv_cache", "weight"]}
    if config.colocate_memory_peak_device == "gpu":
        yield {"colocate_memory_peak_device": "cpu"}
    else:
        yield {"colocate_memory_peak_device": "gpu", "offload_train_keep_host_buffers": False}
    if not config.rematerialize_param_from_master_weight:
        yield {"rematerialize_param_from_master_weight": True}
    if config.offload_train_target == "cpu":
        yield {
            "offload_train_target": "disk",
            "offload_train_disk_dir": folder,
            "offload_train_keep_host_buffers": None,
            "rematerialize_param_from_master_weight": False,
        }
