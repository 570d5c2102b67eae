"""The model and how the trainer spreads it over its ranks."""

from typing import ClassVar

from pydantic import Field

from miles.config.section import Section


class ModelConfig(Section):
    title: ClassVar[str] = "Model and parallel sizes"

    hf_checkpoint: str = Field(
        description="Hugging Face folder: the tokenizer, config.json and the initial weights of trainer and engines."
    )
    tensor_model_parallel_size: int = Field(1, gt=0, description="Trainer ranks that split every layer.")
    pipeline_model_parallel_size: int = Field(1, gt=0, description="Trainer ranks that split the stack of layers.")
    sequence_parallel: bool = Field(
        False, description="Split the activations between tensor-parallel regions along the sequence as well."
    )
    bf16: bool | None = Field(
        None, description="Train in bfloat16 with fp32 master weights, else in fp32. Unset: on with cuda, off with cpu."
    )
