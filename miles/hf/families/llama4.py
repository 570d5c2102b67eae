"""Llama 4."""

from miles.hf.families.base import ModelShape


class Llama4Shape(ModelShape):
    """`moe_layers` lists the layers with experts, and `intermediate_size` is an expert's."""

    model_types = ("llama4_text",)

    @property
    def num_experts(self) -> int:
        # `moe_layers` may be empty; without it, every `interleave_moe_layer_step`th layer has them.
        return 0 if self.fields.get("moe_layers") == [] else super().num_experts

    def has_experts(self, layer: int) -> bool:
        return layer in self.fields["moe_layers"]

    def mlp_width(self, layer: int) -> int:
        if not self.has_experts(layer):
            return self.fields["intermediate_size_mlp"]
        # One expert is shared, which config.json doesn't name.
        return (self.fields["num_experts_per_tok"] + 1) * self.fields["intermediate_size"]
