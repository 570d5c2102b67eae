"""The model and how the trainer spreads it over its ranks."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from miles.config.paths import ModelFolder
from miles.config.section import Derived, Section, derives
from miles.config.values import Values


class ModelConfig(Section):
    title: ClassVar[str] = "Model and parallel sizes"

    hf_checkpoint: ModelFolder = Field(
        description="Hugging Face folder: the tokenizer, config.json and the initial weights of trainer and engines."
    )
    tensor_model_parallel_size: int = Field(1, gt=0, description="Trainer ranks that split every layer.")
    pipeline_model_parallel_size: int = Field(1, gt=0, description="Trainer ranks that split the stack of layers.")
    decoder_first_pipeline_num_layers: int | None = Field(
        None, gt=0, description="Layers of the first pipeline stage. Unset: as many as on the others."
    )
    decoder_last_pipeline_num_layers: int | None = Field(
        None, gt=0, description="Layers of the last pipeline stage. Unset: as many as on the others."
    )
    num_layers_per_virtual_pipeline_stage: int | None = Field(
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
