"""Qwen3.5 with experts."""

from miles.hf.families.base import ModelShape


class Qwen3_5MoeShape(ModelShape):
    """Every layer has experts, whatever else config.json says."""

    model_types = ("qwen3_5_moe_text",)

    def has_experts(self, layer: int) -> bool:
        return True
