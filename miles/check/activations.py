"""What a training step keeps on the GPU for its backward pass, by layer.

Counted are the tensors that autograd holds with Megatron's local layers and our parts, where attention is torch's
variable-length flash attention. In bf16, bytes a token of a dense layer of h hidden channels, q and k channels of
queries and of keys, f inner channels, with norms of queries and keys (Qwen3):

    2 (4 h + (q + 2 k) + 3 q + 2 k + 3 f) + 4 heads

two inputs and two outputs of norms; the product that queries, keys and values are parts of; queries laid out anew,
turned, and the attention's output; keys turned and values laid out anew; the MLP's two products; the softmax's sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles.hf.families import ModelShape
from miles.hf.parallel import ParallelSizes


@dataclass(frozen=True)
class LayerTraits:
    """What decides over a layer's tensors and is not in a ModelShape.

    Args:
        qk_norm: queries and keys are normalised by head.
        wide_norms: norms compute in float32 outside a kernel, and keep their input so.
        post_norms: attention and MLP end in a norm.
        sinks: attention's output is multiplied by what its sinks leave of it.
        fused_activation: an MLP's activation is one kernel, which keeps its input alone.
        itemsize: bytes of a number of the model: 2, or 4 with --no-bf16.
    """

    qk_norm: bool = False
    wide_norms: bool = False
    post_norms: bool = False
    sinks: bool = False
    fused_activation: bool = False
    itemsize: int = 2


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps of each token of a rank.

    Args:
        stream: its input, which is all that is kept where the whole layer is recomputed.
        rest: everything else.
        modules: how much of `rest` is not kept where one of --recompute-modules is recomputed.
        passing: gradients that exist for a moment in its backward pass.
    """

    stream: float
    rest: float
    modules: Mapping[str, float]
    passing: float


@dataclass(frozen=True)
class Recompute:
    """The flags --recompute-granularity, --recompute-method, --recompute-num-layers and --recompute-modules."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int = 1
    modules: tuple[str, ...] = ()


def layer_bytes(shape: ModelShape, layer: int, sizes: ParallelSizes, traits: LayerTraits) -> LayerBytes:
    """What the global `layer` keeps of each token of a rank, that is of T / cp of a micro-batch of T tokens."""
    item, part = traits.itemsize, 1 / sizes.tp
    cut = part if sizes.sequence_parallel else 1.0
    hidden = shape.fields["hidden_size"]
    norm = hidden * cut * (4 if traits.wide_norms else item)
    normed = hidden * cut * item
    # Of several residual streams all are a layer's input, and once more that of its experts.
    streams = shape.wide_stream_bytes() * cut / 2
    attention, core = _attention(shape, layer, sizes, traits)
    mlp, modules, inner = _mlp(shape, layer, sizes, traits)
    return LayerBytes(
        stream=streams or hidden * cut * item,
        rest=(4 if traits.post_norms else 2) * norm - hidden * cut * item + 2 * normed + attention + mlp + streams,
        modules={"core_attn": core, **modules},
        passing=item * (inner + 3 * hidden * cut),
    )


def _attention(shape: ModelShape, layer: int, sizes: ParallelSizes, traits: LayerTraits) -> tuple[float, float]:
    """Bytes between the norm before attention and the end of its last product; and of them those of the core alone."""
    fields, item, part = shape.fields, traits.itemsize, 1 / sizes.tp
    if not shape.attends(layer):
        return _delta_net(fields) * item * part, 0.0
    heads = fields["num_attention_heads"] * part
    sums = 4 * heads
    if shape.is_latent:
        cut = part if sizes.sequence_parallel else 1.0
        nope, rope, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        latents = 2 * (fields["q_lora_rank"] or 0) + 2 * fields["kv_lora_rank"] + rope
        key = heads * (nope + rope)
        # Queries, keys, and values and output as wide as keys; the output as wide as values.
        by_head = key + key * sizes.cp + key * sizes.cp + key + heads * value
        return item * (latents * cut + by_head) + sums, item * (2 * key - heads * value) + sums
    query = heads * shape.head_dim
    key = (fields.get("num_key_value_heads") or fields["num_attention_heads"]) * shape.head_dim * part
    core = item * key * sizes.cp + sums
    kept = item * (2 * query + key * sizes.cp) + core
    if traits.qk_norm and traits.wide_norms:
        kept += 4 * (query + key)
    elif traits.qk_norm:
        # Where each key has one query, those are no copy but a view of the product.
        copied = query if query > key else 0
        kept += item * (query + 2 * key + copied)
    if traits.sinks:
        kept += item * query
    if shape.delta_net_heads:
        kept += item * 3 * query  # the gate of each query, its sigmoid, and what was gated
    return kept, core


def _delta_net(fields: Mapping[str, int]) -> float:
    """Channels that a gated delta net keeps: products, convolution, normalised heads, output and its gate."""
    keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    repeated = fields["linear_num_value_heads"] * fields["linear_key_head_dim"]
    return 2 * (2 * keys + values) + 2 * repeated + 2 * repeated + 5 * values


def _mlp(
    shape: ModelShape, layer: int, sizes: ParallelSizes, traits: LayerTraits
) -> tuple[float, dict[str, float], float]:
    """Bytes from the MLP's first product on; what recomputing a module spares; channels of its passing gradients."""
    fields, item = shape.fields, traits.itemsize
    # Both products' inputs and outputs; without a kernel the activation of one half, and the other with its offset.
    copies = 3 if traits.fused_activation else 5
    if not shape.has_experts(layer):
        inner = shape.mlp_width(layer) / sizes.tp
        return item * copies * inner, {"mlp": item * copies * inner}, 3 * inner
    hidden, experts = fields["hidden_size"], fields["num_experts_per_tok"]
    width = fields.get("moe_intermediate_size") or fields["intermediate_size"]
    cut = 1 / sizes.tp if sizes.sequence_parallel else 1.0
    shared = (shape.mlp_width(layer) - experts * width) / sizes.tp
    # Experts' rows: their inputs and two products; the kernel between them keeps nothing of its own. Three numbers say
    # where a row comes from.
    rows = experts * cut * sizes.etp
    routed = rows * (item * (hidden + 3 * width / sizes.etp) + 24)
    # Scores, probabilities and choices of all experts, in float32.
    router = 12 * shape.num_experts * cut
    kept_shared = item * copies * shared
    modules = {"moe": routed + router + kept_shared, "shared_experts": kept_shared}
    return routed + router + kept_shared, modules, rows * (hidden + 3 * width / sizes.etp) + 3 * shared


@dataclass(frozen=True)
class StageBytes:
    """What the layers of a pipeline stage keep of each token, for one micro-batch.

    Args:
        kept: from the forward pass until the backward pass.
        moment: beside it for a moment, in the backward pass: layers that are recomputed, gradients that pass.
    """

    kept: float
    moment: float


def stage_bytes(chunks: Sequence[Sequence[LayerBytes]], recompute: Recompute) -> StageBytes:
    """What the layers of a stage keep, chunk by chunk as they lie on it."""
    kept, moment = 0.0, 0.0
    for layers in chunks:
        for position, layer in enumerate(layers):
            whole = layer.stream + layer.rest
            if recompute.granularity == "selective":
                spared = sum(layer.modules.get(name, 0.0) for name in recompute.modules)
                kept += whole - spared
                moment = max(moment, layer.passing + spared)
            elif recompute.granularity == "full" and (recompute.method == "uniform" or position < recompute.num_layers):
                first = recompute.method == "block" or position % recompute.num_layers == 0
                kept += layer.stream if first else 0.0
                group = layers[position : position + recompute.num_layers] if first else []
                group = group[:1] if recompute.method == "block" else group
                moment = max(moment, sum(one.stream + one.rest for one in group) + layer.passing)
            else:
                kept += whole
                moment = max(moment, layer.passing)
    return StageBytes(kept, moment)


def micro_batches_in_flight(stage: int, stages: int, chunks: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at a time, in Megatron's one-forward-one-backward schedule.

    Of interleaved stages, where the warm-up is longer (Narayanan et al. 2021, section 2.2), one chunk of one counts as
    its part of the stage.
    """
    if chunks == 1:
        return min(stages - stage, micro_batches)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return min(warm_up, micro_batches * chunks) / chunks


def head_bytes(
    hidden: int, vocab_rows: int, tokens: int, responses: int, chunk: int, itemsize: int
) -> tuple[float, float]:
    """The peak of the output layer's backward pass: what comes of hidden states, and of logits.

    Args:
        vocab_rows: rows of the output weight on this rank.
        tokens: of the micro-batch on this rank. responses: those of them that are scored.
        chunk: --log-probs-chunk-size.
    """
    states = itemsize * hidden * (tokens + 2 * responses) + 8 * 128 * tokens + 64 * responses
    # A chunk's logits in float32 with their gradient, and the weight's gradient in float32.
    logits = min(chunk, responses) * vocab_rows * (4 + itemsize) + 4 * hidden * vocab_rows
    return states, logits
