"""The model and how the trainer spreads it over its ranks."""

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.names import flag_of
from miles.config.other_models import unread_weights
from miles.config.paths import ModelFolder
from miles.config.section import Derived, Rule, Section, derives, rule
from miles.config.values import Values
from miles.hf.described import describe
from miles.hf.families import ModelShape, shape_of
from miles.hf.shape import model_shape

_STAGES = OnlyWith("--pipeline-model-parallel-size above 1")


class ModelConfig(Section):
    title: ClassVar[str] = "Model and parallel sizes"

    hf_checkpoint: ModelFolder = Field(
        description="Hugging Face folder: the tokenizer, config.json and the initial weights of trainer and engines."
    )
    tensor_model_parallel_size: int = Field(1, gt=0, description="Trainer ranks that split every layer.")
    pipeline_model_parallel_size: int = Field(1, gt=0, description="Trainer ranks that split the stack of layers.")
    decoder_first_pipeline_num_layers: Annotated[int | None, _STAGES] = Field(
        None, gt=0, description="Layers of the first pipeline stage. Unset: as many as on the others."
    )
    decoder_last_pipeline_num_layers: Annotated[int | None, _STAGES] = Field(
        None, gt=0, description="Layers of the last pipeline stage. Unset: as many as on the others."
    )
    num_layers_per_virtual_pipeline_stage: Annotated[int | None, _STAGES] = Field(
        None,
        gt=0,
        description="Interleave pipeline stages: each rank holds several stretches of this many layers, which shortens "
        "the wait at both ends of a step. Unset: one stretch a rank.",
    )
    context_parallel_size: int = Field(1, gt=0, description="Trainer ranks that split every sequence.")
    expert_model_parallel_size: int = Field(
        1, gt=0, description="Trainer ranks that share out a layer's experts, among those of one pipeline stage."
    )
    expert_tensor_parallel_size: int | None = Field(
        None,
        gt=0,
        description="Trainer ranks that split every expert. Unset: 1 where experts are shared out, else "
        "--tensor-model-parallel-size.",
    )
    sequence_parallel: bool = Field(
        False, description="Split the activations between tensor-parallel regions along the sequence as well."
    )
    bf16: bool | None = Field(
        None, description="Train in bfloat16 with fp32 master weights, else in fp32. Unset: on with cuda, off with cpu."
    )


@derives("bf16")
def _precision(v: Values) -> Iterator[Derived]:
    if v.bf16 is None:
        yield "bf16", v.device == "cuda", f"--device {v.device}"


@derives("expert_tensor_parallel_size")
def _expert_tensor_parallel(v: Values) -> Iterator[Derived]:
    if v.expert_tensor_parallel_size is None:
        if v.expert_model_parallel_size > 1:
            yield "expert_tensor_parallel_size", 1, "--expert-model-parallel-size shares whole experts out"
        else:
            yield "expert_tensor_parallel_size", v.tensor_model_parallel_size, "--tensor-model-parallel-size"


def _of_the_model(rule: Callable[[Values, ModelShape], Iterator[str]]) -> Rule:
    """A rule about the model: it is asked with config.json, where that can be read (another rule complains if not)."""

    @functools.wraps(rule)
    def ask(v: Values) -> Iterator[str]:
        fields = model_shape(v.hf_checkpoint)
        if fields is not None and v.needs_trainer:
            yield from rule(v, shape_of(fields))

    return ask


@rule
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


@rule
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


@rule
def _family(v: Values) -> Iterator[str]:
    model = describe(v.hf_checkpoint)
    if v.needs_trainer and model is not None and model.traits is None:
        kind = f"is a {model.architecture}" if model.architecture else "is of no architecture"
        yield (
            f"--hf-checkpoint {v.hf_checkpoint} {kind} (config.json), which can't be trained here; "
            "docs/user-guide/models.md has those that can"
        )


@rule
def _weights_are_read(v: Values) -> Iterator[str]:
    if v.needs_trainer:
        yield from unread_weights("--hf-checkpoint", v.hf_checkpoint)


@rule
@_of_the_model
def _parallel_sizes(v: Values, shape: ModelShape) -> Iterator[str]:
    yield from shape.layout_problems(v.parallel_sizes)


@rule
@_of_the_model
def _layers(v: Values, shape: ModelShape) -> Iterator[str]:
    layers, stages = shape.fields.get("num_hidden_layers"), v.pipeline_model_parallel_size
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


@rule
@_of_the_model
def _transformer_engine(v: Values, shape: ModelShape) -> Iterator[str]:
    if v.transformer_impl == "transformer_engine" and not shape.has_transformer_engine:
        yield (
            f"--transformer-impl transformer_engine has no layers for {shape.fields.get('model_type')} (config.json); "
            "use local"
        )


@rule
@_of_the_model
def _without_experts(v: Values, shape: ModelShape) -> Iterator[str]:
    if shape.num_experts:
        return
    tensor = v.expert_tensor_parallel_size
    if v.expert_model_parallel_size == 1 and tensor != v.tensor_model_parallel_size:
        yield f"--expert-tensor-parallel-size {tensor} needs a model with experts, this one has none; leave it out"
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"):
        if getattr(v, name):
            yield f"{flag_of(name)} {getattr(v, name)} needs a model with experts, this one has none; leave it out"
    if v.moe_router_freeze_gate:
        yield "--moe-router-freeze-gate needs a model with experts, this one has none; leave it out"


@rule
@_of_the_model
def _selection_bias(v: Values, shape: ModelShape) -> Iterator[str]:
    model = describe(v.hf_checkpoint)
    if shape.num_experts and v.moe_router_bias_update_rate and model is not None and model.selection_bias is False:
        yield (
            f"--moe-router-bias-update-rate {v.moe_router_bias_update_rate} needs a model whose routers have a bias in "
            f"the choice of experts, as DeepSeek-V3 has; a {model.architecture} has none; leave it out, or use "
            "--moe-router-load-balancing-type aux_loss"
        )
