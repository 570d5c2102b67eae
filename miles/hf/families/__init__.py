"""What each family's config.json means, where it differs from the others'; nothing here needs torch or transformers."""

from collections.abc import Mapping
from typing import Any

from miles.hf.families.base import ModelShape
from miles.hf.families.deepseek_v4 import DeepseekV4Shape
from miles.hf.families.gpt_oss import GptOssShape
from miles.hf.families.llama4 import Llama4Shape
from miles.hf.families.qwen3_5 import Qwen3_5MoeShape

SHAPES: tuple[type[ModelShape], ...] = (DeepseekV4Shape, GptOssShape, Llama4Shape, Qwen3_5MoeShape)

__all__ = ["SHAPES", "ModelShape", "shape_of"]


def shape_of(fields: Mapping[str, Any]) -> ModelShape:
    """The model of a config.json, of which `fields` are the language model's."""
    kinds = {model_type: kind for kind in SHAPES for model_type in kind.model_types}
    return kinds.get(fields.get("model_type", ""), ModelShape)(fields)
