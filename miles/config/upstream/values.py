"""Values that Miles and slime take for flags of ours, where what is meant is had here in another way.

Each of these says which field gets which value, and what the user is told: the flag as written, and why.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from miles.config.names import flag_of
from miles.config.upstream.functions import OURS, as_ours
from miles.config.values import Undetermined, Values
from miles.hf.described import describe
from miles.utils.checkpoint_folder import MARKER

Taken = tuple[str, Any, str]

# Of the balancing losses of Megatron, the one that is here is aux_loss.
OTHER_BALANCING = ("seq_aux_loss", "global_aux_loss")


def texts_taken(raw: Mapping[str, Any]) -> Iterator[Taken]:
    """Before types are looked at; a value of None takes the field out.

    Args:
        raw: texts of the command line and values of the YAML file, by field.
    """
    if raw.get("moe_token_dispatcher_type") == "flex":
        yield "moe_token_dispatcher_type", "alltoall", "--moe-token-dispatcher-type flex (alltoall)"
    balancing = raw.get("moe_router_load_balancing_type")
    if balancing in OTHER_BALANCING and _is_zero(raw.get("moe_aux_loss_coeff", 0)):
        yield "moe_router_load_balancing_type", "none", f"--moe-router-load-balancing-type {balancing} (weighted by 0)"
    yield from _functions(raw)
    if str(raw.get("log_probs_chunk_size")) == "-1":
        yield "log_probs_chunk_size", None, "--log-probs-chunk-size -1 (a chunk changes no number)"


def _functions(raw: Mapping[str, Any]) -> Iterator[Taken]:
    for name, path in raw.items():
        if not name.endswith("_path") or not isinstance(path, str):
            continue
        spelled = as_ours(path)
        ours = OURS.get(spelled)
        if ours is not None:
            note = f"{flag_of(name)} {path} ({ours.note})"
            yield from ((field, value, note) for field, value in {name: None, **ours.fields}.items())
        elif spelled != path:
            yield name, spelled, f"{flag_of(name)} {path} ({spelled})"


def _is_zero(value: Any) -> bool:
    try:
        return math.isclose(float(value), 0)
    except (TypeError, ValueError):
        return False


def values_taken(v: Values) -> Iterator[Taken]:
    """Before anything is derived; a function that reads a value which is not known has nothing to say."""
    for function in _OF_VALUES:
        try:
            yield from function(v)
        except Undetermined:
            continue


def _sequence_parallel(v: Values) -> Iterator[Taken]:
    if v.sequence_parallel and v.tensor_model_parallel_size == 1:
        yield "sequence_parallel", False, "--sequence-parallel (--tensor-model-parallel-size is 1)"


def _experts_of_a_dense_model(v: Values) -> Iterator[Taken]:
    model = describe(v.hf_checkpoint)
    if v.expert_tensor_parallel_size == 1 < v.tensor_model_parallel_size and v.expert_model_parallel_size == 1:
        if model is not None and not model.shape.num_experts:
            yield "expert_tensor_parallel_size", None, "--expert-tensor-parallel-size 1 (the model has no experts)"


def _token_budget(v: Values) -> Iterator[Taken]:
    if v.max_tokens_per_gpu is not None and not v.use_dynamic_batch_size:
        yield "max_tokens_per_gpu", None, f"--max-tokens-per-gpu {v.max_tokens_per_gpu} (no --use-dynamic-batch-size)"


def _converted_reference(v: Values) -> Iterator[Taken]:
    if v.ref_load is not None and is_converted(v.ref_load):
        yield "ref_load", None, f"--ref-load {v.ref_load} (converted weights: those of --hf-checkpoint)"


def _converted_start(v: Values) -> Iterator[Taken]:
    if v.load is None or not is_converted(v.load):
        return
    yield "load", None, f"--load {v.load} (converted weights: those of --hf-checkpoint)"
    for name in ("no_load_optim", "no_load_rng", "finetune"):
        if getattr(v, name):
            yield name, False, f"{flag_of(name)} (there are only weights in it)"


def _converted_critic(v: Values) -> Iterator[Taken]:
    if v.critic_load is not None and is_converted(v.critic_load):
        yield "critic_load", None, f"--critic-load {v.critic_load} (converted weights: those of --hf-checkpoint)"


def _engine_ranks(v: Values) -> Iterator[Taken]:
    given = v.sglang.get("tp_size")
    if given is not None and given * v.sglang.get("pp_size", 1) == v.rollout_num_gpus_per_engine:
        rest = {name: value for name, value in v.sglang.items() if name != "tp_size"}
        yield "sglang", rest, f"--sglang-tp-size {given} ({flag_of('rollout_num_gpus_per_engine')})"


_OF_VALUES: tuple[Callable[[Values], Iterator[Taken]], ...] = (
    _sequence_parallel,
    _experts_of_a_dense_model,
    _token_budget,
    _converted_reference,
    _converted_start,
    _converted_critic,
    _engine_ranks,
)


def is_converted(folder: str) -> bool:
    """Whether a folder holds a model that was converted for Megatron, as Miles' tools mark it."""
    try:
        return (Path(folder) / MARKER).read_text(encoding="utf-8").strip() == "release"
    except (OSError, UnicodeDecodeError):
        return False
