"""What the trainer's parallel sizes must satisfy, among themselves and with the model's config.json."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from miles.config.layout import Layout
from miles.config.names import flag_of
from miles.config.paths import ModelFolder, read_config_json
from miles.config.values import Values


def _world(v: Values) -> Iterator[str]:
    tensor, pipeline, context = (
        v.tensor_model_parallel_size,
        v.pipeline_model_parallel_size,
        v.context_parallel_size,
    )
    if v.needs_trainer and v.world_size % v.model_parallel_size:
        product = f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}"
        if context > 1:
            product += f" x --context-parallel-size {context}"
        yield (
            f"{v.world_size} trainer ranks (--actor-num-nodes {v.actor_num_nodes} x --actor-num-gpus-per-node "
            f"{v.actor_num_gpus_per_node}) cannot be divided into replicas of {v.model_parallel_size} ({product}); "
            "make the first a multiple of the second"
        )


def _sequence_parallel(v: Values) -> Iterator[str]:
    if v.sequence_parallel and v.tensor_model_parallel_size == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1, it is 1; drop the flag"


def _experts_in_world(v: Values) -> Iterator[str]:
    """Megatron lays experts out in a grid of their own over the ranks of one pipeline stage."""
    expert, tensor = v.expert_model_parallel_size, v.expert_tensor_parallel_size
    stage = v.world_size // v.pipeline_model_parallel_size
    if v.needs_trainer and not v.world_size % v.model_parallel_size and stage % v.sharers_of_experts:
        yield (
            f"{stage} trainer ranks a pipeline stage cannot be divided into groups of {v.sharers_of_experts} for "
            f"experts (--expert-model-parallel-size {expert} x --expert-tensor-parallel-size {tensor}); choose sizes "
            f"whose product divides {stage}"
        )


def _expert_tokens(v: Values) -> Iterator[str]:
    if v.moe_token_dispatcher_type == "allgather" and v.sharers_of_experts > v.tensor_model_parallel_size:
        yield (
            f"--moe-token-dispatcher-type allgather needs the same number of tokens on all {v.sharers_of_experts} "
            f"ranks that share a layer's experts, but only {v.tensor_model_parallel_size} of them have the same "
            "samples (--tensor-model-parallel-size); use alltoall"
        )


def _streamed_experts(v: Values) -> Iterator[str]:
    if v.stream_optimizer_state_to_disk and v.expert_model_parallel_size > 1:
        yield (
            "--stream-optimizer-state-to-disk streams one optimizer, and experts that are shared out have one of their "
            f"own (--expert-model-parallel-size {v.expert_model_parallel_size}); drop one of the two"
        )


def _uneven_stages(v: Values) -> Iterator[str]:
    pipeline = v.pipeline_model_parallel_size
    ends = (v.decoder_first_pipeline_num_layers, v.decoder_last_pipeline_num_layers)
    flags = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    given = [f"{flag} {layers}" for flag, layers in zip(flags, ends, strict=True) if layers is not None]
    if given and pipeline == 1:
        yield f"{' and '.join(given)} without stages: --pipeline-model-parallel-size is 1; drop it, or raise that"
    if v.num_layers_per_virtual_pipeline_stage is not None and pipeline == 1:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {v.num_layers_per_virtual_pipeline_stage} interleaves pipeline "
            "stages, and --pipeline-model-parallel-size is 1; drop it, or raise that"
        )


def _model_rule(rule: Callable[[Values, dict[str, Any]], Iterator[str]]) -> Callable[[Values], Iterator[str]]:
    """A rule about the model: it is asked with config.json, where that can be read (another rule complains if not)."""

    @functools.wraps(rule)
    def ask(v: Values) -> Iterator[str]:
        shape = model_shape(v.hf_checkpoint)
        if shape is not None and v.needs_trainer:
            yield from rule(v, shape)

    return ask


def model_shape(folder: str) -> dict[str, Any] | None:
    """What `folder`/config.json says of the language model; None where `ModelFolder.problem` complains."""
    if ModelFolder.problem("", folder):
        return None
    shape = read_config_json(folder)
    return shape.get("text_config", shape)


@_model_rule
def _heads(v: Values, shape: dict[str, Any]) -> Iterator[str]:
    size = v.tensor_model_parallel_size
    for key in ("num_attention_heads", "num_key_value_heads"):
        if shape.get(key) and shape[key] % size:
            yield (
                f"--tensor-model-parallel-size {size} does not divide the model's {key} {shape[key]}; choose a divisor "
                "of it"
            )


@_model_rule
def _layers(v: Values, shape: dict[str, Any]) -> Iterator[str]:
    layers, stages = shape.get("num_hidden_layers"), v.pipeline_model_parallel_size
    if not layers or stages == 1:
        return
    first, last = v.decoder_first_pipeline_num_layers, v.decoder_last_pipeline_num_layers
    chunk = v.num_layers_per_virtual_pipeline_stage
    left, left_stages = layers - (first or 0) - (last or 0), stages - (first is not None) - (last is not None)
    if left < 0 or (left_stages == 0 and left) or (left_stages and (left == 0 or left % left_stages)):
        if first is None and last is None:
            yield (
                f"--pipeline-model-parallel-size {stages} does not divide the model's num_hidden_layers {layers}; "
                "choose a divisor of it, or give --decoder-first-pipeline-num-layers or "
                "--decoder-last-pipeline-num-layers"
            )
        else:
            yield (
                f"of the model's {layers} layers, --decoder-first-pipeline-num-layers "
                f"{0 if first is None else first} and --decoder-last-pipeline-num-layers "
                f"{0 if last is None else last} leave {left}, which {left_stages} further pipeline stages cannot share "
                "equally; choose others"
            )
        return
    if chunk is not None:
        counts = {layers // stages} if first is None and last is None else {first, last} - {None}
        if left_stages:
            counts.add(left // left_stages)
        wrong = sorted(count for count in counts if count % chunk or count == chunk)
        if wrong:
            yield (
                f"--num-layers-per-virtual-pipeline-stage {chunk} does not cut a pipeline stage of {wrong[0]} layers "
                "into two or more equal parts; choose a smaller divisor of it, or leave it out"
            )
        elif len(counts) > 1:
            yield (
                f"--num-layers-per-virtual-pipeline-stage {chunk} with pipeline stages of "
                f"{' and '.join(map(str, sorted(counts)))} layers: interleaving needs the same number on each; leave "
                "out --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or this flag"
            )


def virtual_stages(v: Layout) -> int | None:
    """Chunks of the model on each pipeline stage; None where stages are not interleaved."""
    chunk = v.num_layers_per_virtual_pipeline_stage
    if chunk is None:
        return None
    return model_shape(v.hf_checkpoint)["num_hidden_layers"] // v.pipeline_model_parallel_size // chunk


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def experts_of(shape: dict[str, Any]) -> int:
    """Experts of one layer of a model; 0 for a dense one."""
    return next((shape[key] for key in EXPERT_COUNTS if shape.get(key)), 0)


@_model_rule
def _experts(v: Values, shape: dict[str, Any]) -> Iterator[str]:
    experts, size = experts_of(shape), v.expert_model_parallel_size
    if size > 1 and not experts:
        yield f"--expert-model-parallel-size {size} needs a model with experts, this one has none; leave it out"
    elif experts % size:
        yield f"--expert-model-parallel-size {size} does not divide the model's {experts} experts; choose a divisor"
    if experts:
        return
    tensor = v.expert_tensor_parallel_size
    if size == 1 and tensor != v.tensor_model_parallel_size:
        yield f"--expert-tensor-parallel-size {tensor} needs a model with experts, this one has none; leave it out"
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if getattr(v, name):
            yield f"{flag_of(name)} {getattr(v, name)} needs a model with experts, this one has none; leave it out"


@_model_rule
def _needs_sequence_parallel(v: Values, shape: dict[str, Any]) -> Iterator[str]:
    """Megatron computes some gradients of these models wrongly otherwise, or refuses in the middle of a step."""
    if v.tensor_model_parallel_size == 1 or v.sequence_parallel:
        return
    for kind, found in (
        ("experts", experts_of(shape)),
        ("latent attention", shape.get("kv_lora_rank")),
        ("gated delta nets", shape.get("linear_num_key_heads")),
    ):
        if found:
            yield (
                f"--tensor-model-parallel-size {v.tensor_model_parallel_size} of a model with {kind} needs "
                "--sequence-parallel: some gradients would be wrong without; add it"
            )
            return


LAYOUT_RULES = (
    _world,
    _sequence_parallel,
    _experts_in_world,
    _expert_tokens,
    _streamed_experts,
    _uneven_stages,
    _heads,
    _layers,
    _experts,
    _needs_sequence_parallel,
)
