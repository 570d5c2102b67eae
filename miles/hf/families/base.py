"""What config.json says of a model, for one language model of attention and MLPs in layers."""

from collections.abc import Mapping
from typing import Any

from miles.hf.parallel import ParallelSizes

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class ModelShape:
    """A language model as config.json describes it, in the words that most families use; others override.

    Nothing here knows a trainer. Layers are counted from 0.

    Args:
        fields: config.json of the language model, as it is written or as transformers completes it.

    Attributes:
        model_types: the values of config.json's `model_type` that a family's own class is for.
        has_transformer_engine: its layers can be Transformer Engine's.
    """

    model_types: tuple[str, ...] = ()
    has_transformer_engine = True

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = fields

    # Experts

    @property
    def num_experts(self) -> int:
        """Experts of one layer, without shared ones; 0 for a dense model."""
        return next((self.fields[key] for key in EXPERT_COUNTS if self.fields.get(key)), 0)

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is one of experts."""
        fields = self.fields
        if not self.num_experts:
            return False
        if fields.get("mlp_layer_types"):
            return fields["mlp_layer_types"][layer] == "sparse"
        if layer < fields.get("first_k_dense_replace", 0) or layer in (fields.get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % fields.get("decoder_sparse_step", 1) == 0

    def mlp_width(self, layer: int) -> int:
        """Inner channels of a layer's MLP, or of the experts together that a token goes to."""
        fields = self.fields
        if not self.has_experts(layer):
            return fields["intermediate_size"]
        width = fields.get("moe_intermediate_size") or fields["intermediate_size"]
        shared = fields.get("shared_expert_intermediate_size") or width * (fields.get("n_shared_experts") or 0)
        return fields["num_experts_per_tok"] * width + shared

    # Attention

    @property
    def head_dim(self) -> int:
        """Width of one attention head, which follows where config.json does not give it."""
        return self.fields.get("head_dim") or self.fields["hidden_size"] // self.fields["num_attention_heads"]

    @property
    def is_latent(self) -> bool:
        """Whether keys and values come from a latent, as DeepSeek's do."""
        return bool(self.fields.get("kv_lora_rank"))

    @property
    def delta_net_heads(self) -> int:
        """Key heads of its gated delta nets; 0 where it has none."""
        return self.fields.get("linear_num_key_heads") or 0

    def layer_type(self, layer: int) -> str | None:
        """The kind of a layer's attention; None where config.json tells no kinds apart."""
        return self.fields["layer_types"][layer] if self.fields.get("layer_types") else None

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention; otherwise it has a gated delta net."""
        return self.layer_type(layer) != "linear_attention"

    def window(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, itself among them; None for all before it."""
        kind = self.layer_type(layer)
        if kind == "deepseek_sparse_attention":
            return self.fields["index_topk"]
        if kind == "chunked_attention":
            return self.fields["attention_chunk_size"]
        # Mistral has no kinds of layers: a window, if any, is all layers'.
        return self.fields.get("sliding_window") if kind in ("sliding_attention", None) else None

    def attention_weights(self, layer: int) -> int:
        """Weights of a layer's projections, of attention or of a gated delta net."""
        fields, hidden, heads = self.fields, self.fields["hidden_size"], self.fields["num_attention_heads"]
        if not self.attends(layer):
            keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
            values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
            return hidden * (2 * keys + 3 * values + 2 * fields["linear_num_value_heads"])
        if self.is_latent:
            nope, rope, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            query_rank, rank, rows = fields["q_lora_rank"], fields["kv_lora_rank"], heads * (nope + rope)
            query = hidden * rows if query_rank is None else query_rank * (hidden + rows)
            return query + hidden * (rank + rope) + rank * heads * (nope + value) + hidden * heads * value
        gates = heads if self.delta_net_heads else 0  # Qwen3-Next's attention has one for each query
        groups = fields.get("num_key_value_heads") or heads
        return hidden * self.head_dim * (2 * heads + gates + 2 * groups)

    def numbers_per_pair(self, layer: int) -> int:
        """Numbers that a layer multiplies for each pair of a query and a key: the query's and the value's."""
        if not self.attends(layer):
            return 0
        fields, heads = self.fields, self.fields["num_attention_heads"]
        if self.is_latent:
            return heads * (fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"] + fields["v_head_dim"])
        return 2 * heads * self.head_dim

    def attention_pairs(self, layer: int) -> Mapping[int | None, float]:
        """By window (None: none), the numbers that a layer multiplies for each pair of a query and a key within it."""
        return {self.window(layer): self.numbers_per_pair(layer)} if self.attends(layer) else {}

    def wide_stream_bytes(self) -> int:
        """Bytes of residual streams in float32 that a layer keeps of each token for the backward pass."""
        return 0

    # Parallelism

    def cut_by_tensor_parallelism(self) -> dict[str, int]:
        """What tensor parallelism shares out evenly, by its key in config.json."""
        keys = ("num_attention_heads", "num_key_value_heads")
        return {key: self.fields[key] for key in keys if self.fields.get(key)}

    def layout_problems(self, sizes: ParallelSizes) -> list[str]:
        """The parallel sizes that the model cannot have, each in a sentence for the user with the way out."""
        return self._tensor_problems(sizes) + self._expert_problems(sizes) + self._sequence_problems(sizes)

    def _tensor_problems(self, sizes: ParallelSizes) -> list[str]:
        problems = [
            f"--tensor-model-parallel-size {sizes.tp} does not divide the model's {key} {count}; choose a divisor of it"
            for key, count in self.cut_by_tensor_parallelism().items()
            if count % sizes.tp
        ]
        if self.delta_net_heads % (sizes.tp * sizes.cp):
            problems.append(
                f"--tensor-model-parallel-size {sizes.tp} times --context-parallel-size {sizes.cp} does not divide the "
                f"model's linear_num_key_heads {self.delta_net_heads}; choose sizes whose product does"
            )
        return problems

    def _expert_problems(self, sizes: ParallelSizes) -> list[str]:
        flag = f"--expert-model-parallel-size {sizes.ep}"
        if sizes.ep > 1 and not self.num_experts:
            return [f"{flag} needs a model with experts, this one has none; leave it out"]
        if self.num_experts % sizes.ep:
            return [f"{flag} does not divide the model's {self.num_experts} experts; choose a divisor"]
        return []

    def _sequence_problems(self, sizes: ParallelSizes) -> list[str]:
        """Megatron computes some gradients of these models wrongly otherwise, or refuses in the middle of a step."""
        if sizes.tp == 1 or sizes.sequence_parallel:
            return []
        kinds = {
            "experts": self.num_experts,
            "latent attention": self.is_latent,
            "gated delta nets": self.delta_net_heads,
        }
        return [
            f"--tensor-model-parallel-size {sizes.tp} of a model with {kind} needs --sequence-parallel: some gradients "
            "would be wrong without; add it"
            for kind, there in kinds.items()
            if there
        ][:1]
