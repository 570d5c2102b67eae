"""DeepSeek-V4."""

from collections.abc import Mapping
from typing import Any

from miles.hf.families.base import ModelShape
from miles.hf.parallel import ParallelSizes

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# What transformers calls layers by their ratio in published configurations.
KINDS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
# Of published names and those of the repackaging in FP8 (sgl-project's): whole names, then parts of others.
_REPACKAGED = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
}
_REPACKAGED_PARTS = (
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".gate.tid2eid", ".topk.tid2eid"),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)


def repackaged_name(name: str) -> str:
    """The repackaging's name of a weight that has `name` in the published checkpoints."""
    if name in _REPACKAGED:
        return _REPACKAGED[name]
    for published, repackaged in _REPACKAGED_PARTS:
        name = name.replace(published, repackaged)
    return "model." + name


class DeepseekV4Shape(ModelShape):
    """Every layer has experts. All heads share one key, and a query sees a window of tokens and compressed entries.

    config.json says the tokens to an entry layer by layer (`compress_ratios`, with those of next-token layers behind);
    transformers makes `layer_types` and `compress_rates` of it.
    """

    model_types = ("deepseek_v4",)
    has_transformer_engine = False

    def has_experts(self, layer: int) -> bool:
        return True

    def layer_type(self, layer: int) -> str:
        if "layer_types" in self.fields:
            return self.fields["layer_types"][layer]
        return KINDS[self.fields["compress_ratios"][layer]]

    def ratio(self, layer: int) -> int:
        """Tokens to an entry; 0 for a layer with a window of tokens only."""
        if "layer_types" in self.fields:
            return self.fields["compress_rates"].get(self.layer_type(layer), 0)
        return self.fields["compress_ratios"][layer]

    def window(self, layer: int) -> int:
        return self.fields["sliding_window"]

    def attention_weights(self, layer: int) -> int:
        fields, hidden, size, rank = self.fields, self.fields["hidden_size"], self.head_dim, self.fields["o_lora_rank"]
        heads = fields["num_attention_heads"] * size
        entries = {WINDOW: 0, SPARSE: 2, HEAVY: 1}[self.layer_type(layer)] * 2 * hidden * size
        latents = fields["q_lora_rank"] * (hidden + heads) + hidden * size
        return latents + entries + rank * (heads + fields["o_groups"] * hidden)

    def attention_pairs(self, layer: int) -> Mapping[int | None, float]:
        """An entry stands for as many tokens as it is made of."""
        numbers, kind = self.numbers_per_pair(layer), self.layer_type(layer)
        tokens: dict[int | None, float] = {self.window(layer): numbers}
        if kind == WINDOW:
            return tokens
        ratio = self.ratio(layer)
        seen = self.fields["index_topk"] * ratio if kind == SPARSE else None
        return tokens | {seen: numbers / ratio + tokens.get(seen, 0.0)}

    def wide_stream_bytes(self) -> int:
        """All streams, where attention reads them and where experts do."""
        # 4: transformers', where config.json does not say.
        return 2 * self.fields.get("hc_mult", 4) * self.fields["hidden_size"] * 4

    def cut_by_tensor_parallelism(self) -> dict[str, int]:
        return {key: self.fields[key] for key in ("num_attention_heads", "o_groups")}

    def layout_problems(self, sizes: ParallelSizes) -> list[str]:
        return self._ratio_problems() + super().layout_problems(sizes)

    def _ratio_problems(self) -> list[str]:
        fields: Mapping[str, Any] = self.fields
        ratios = fields.get("compress_ratios")
        if ratios is None:
            return []
        layers, further = fields["num_hidden_layers"], fields.get("num_nextn_predict_layers", 0)
        problems = []
        if other := sorted(set(ratios) - KINDS.keys()):
            problems.append(
                f"config.json has compress_ratios of {', '.join(map(str, other))} beside 0, 4 and 128: a later model, "
                "which is not supported"
            )
        if len(ratios) != layers + further:
            problems.append(
                f"config.json has {len(ratios)} compress_ratios for {layers} layers and {further} next-token layers "
                "(num_nextn_predict_layers): one is needed for each"
            )
        return problems
