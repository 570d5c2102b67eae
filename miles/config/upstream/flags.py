"""Flags of Miles and slime that change nothing here: config.json says it, or it is done anyway. One line a flag.

Those of the model have Megatron's names. What one is compared with stands in miles/hf/described.py, or is a key of
config.json; another value is refused. A flag that is in neither table and none of ours may be in `absent.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles.config.upstream.meant import Meant, anything, anyway, either, layers, number, numbers, switch, word
from miles.config.values import Undetermined, Values
from miles.hf.described import DescribedModel, bare, describe

# Layers of one family that another is built of.
_LAYERS_OF = {"deepseekv32": "glm5"}


def _names_the_family(value: str, names: set[str]) -> bool:
    return any(name in value or value in name or _LAYERS_OF.get(name, value + " ") in value for name in names)


def _variant(model: DescribedModel) -> str | None:
    if model.traits is None:
        return None
    return "gated_delta_net" if model.shape.delta_net_heads else "dsa" if model.get("index_topk") else "none"


def _same_variant(value: str, said: str) -> bool:
    return value == said or (said == "dsa" and value.lower().startswith(("ds", "csa", "hca")))


def _same_window(value: Any, said: int) -> bool:
    # Megatron counts the tokens before a query, or these and the query's own.
    left = value[0] if isinstance(value, list) else value
    return left in (said, said - 1)


def _same_start(value: Any, said: list[int]) -> bool:
    shorter = min(len(value), len(said)) if isinstance(value, list) else 0
    return shorter > 0 and value[:shorter] == said[:shorter]


_FAMILY = Meant(
    lambda words: bare("".join(words)), lambda m: m.family_names if m.traits else None, agrees=_names_the_family
)

MODEL: dict[str, Meant] = {
    "--num-layers": number("num_hidden_layers"),
    "--hidden-size": number("hidden_size"),
    "--ffn-hidden-size": number(lambda m: m.dense_width),
    "--num-attention-heads": number("num_attention_heads"),
    "--group-query-attention": switch(),
    "--num-query-groups": number(lambda m: None if m.is_latent else m.get("num_key_value_heads")),
    "--kv-channels": number(lambda m: m.head_dim),
    "--vocab-size": number("vocab_size"),
    "--normalization": word(lambda m: "RMSNorm"),
    "--norm-epsilon": number("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "--apply-layernorm-1p": switch(lambda m: m.trait("plus_one_norm")),
    "--post-self-attn-layernorm": switch(lambda m: m.trait("post_norms")),
    "--post-mlp-layernorm": switch(lambda m: m.trait("post_norms")),
    "--qk-layernorm": switch(lambda m: m.qk_norm),
    "--disable-bias-linear": switch(lambda m: None if m.traits is None else not m.traits.linear_bias),
    "--add-qkv-bias": switch(lambda m: m.qkv_bias),
    "--swiglu": switch(lambda m: m.gated),
    "--activation-func-clamp-value": number("swiglu_limit"),
    "--no-activation-func-clamp-shared-expert": switch(),
    "--untie-embeddings-and-output-weights": switch(lambda m: m.untied),
    "--softmax-type": word(lambda m: {True: "learnable", False: "vanilla", None: None}[m.trait("sinks")]),
    "--window-size": numbers(lambda m: m.get("sliding_window"), _same_window),
    "--window-attn-skip-freq": layers(lambda m: m.layers_with_windows),
    "--attention-output-gate": switch(lambda m: None if m.traits is None else m.shape.delta_net_heads > 0),
    "--use-gated-attention": switch(lambda m: None if m.traits is None else m.shape.delta_net_heads > 0),
    # Positions
    "--position-embedding-type": word(lambda m: m.rope_kind, "rope"),
    "--use-rotary-position-embeddings": switch(),
    "--no-position-embedding": anyway("positions are rotary"),
    "--max-position-embeddings": anything("positions are rotary"),
    "--rotary-base": number(lambda m: m.rope_base),
    "--rotary-percent": number(lambda m: m.rotary_share),
    "--rotary-interleaved": switch(lambda m: None if m.is_latent else m.trait("interleaved")),
    "--rotary-scaling-factor": number(lambda m: m.rope_factor),
    "--rope-type": word(lambda m: None if m.rope_kind == "rope" else m.rope_kind),
    "--original-max-position-embeddings": number(lambda m: m.rope.get("original_max_position_embeddings")),
    "--beta-fast": number(lambda m: m.rope.get("beta_fast")),
    "--beta-slow": number(lambda m: m.rope.get("beta_slow")),
    "--mscale": number(lambda m: m.rope.get("mscale")),
    "--mscale-all-dim": number(lambda m: m.rope.get("mscale_all_dim")),
    # Latent attention
    "--multi-latent-attention": switch(lambda m: m.is_latent),
    "--q-lora-rank": number("q_lora_rank"),
    "--kv-lora-rank": number("kv_lora_rank"),
    "--qk-head-dim": number("qk_nope_head_dim"),
    "--qk-pos-emb-head-dim": number("qk_rope_head_dim"),
    "--v-head-dim": number("v_head_dim"),
    # Experts
    "--num-experts": number(lambda m: m.shape.num_experts),
    "--moe-router-topk": number("num_experts_per_tok", "top_k_experts"),
    "--moe-ffn-hidden-size": number(lambda m: m.expert_width),
    "--moe-layer-freq": layers(lambda m: m.layers_with_experts),
    "--moe-shared-expert-intermediate-size": number(lambda m: m.shared_width),
    "--moe-shared-expert-gate": switch(lambda m: m.shared_gate),
    "--moe-latent-size": number("moe_latent_size"),
    "--moe-router-score-function": word(lambda m: m.score),
    "--moe-router-pre-softmax": switch(lambda m: m.scores_first),
    "--moe-router-enable-expert-bias": switch(lambda m: m.selection_bias),
    "--moe-router-topk-scaling-factor": number(lambda m: m.score_factor),
    "--moe-router-num-groups": number("n_group"),
    "--moe-router-group-topk": number("topk_group"),
    # Layers for further tokens, sparse attention and DeepSeek-V4
    "--mtp-num-layers": number("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "--experimental-attention-variant": Meant(lambda words: "".join(words), _variant, agrees=_same_variant),
    "--dsa-indexer-n-heads": number("index_n_heads"),
    "--dsa-indexer-head-dim": number("index_head_dim"),
    "--dsa-indexer-topk": number("index_topk"),
    "--dsv4-hc-mult": number("hc_mult"),
    "--dsv4-hc-sinkhorn-iters": number("hc_sinkhorn_iters"),
    "--dsv4-compress-ratios": numbers(lambda m: m.get("compress_ratios"), _same_start),
    "--dsv4-compress-rope-theta": number("compress_rope_theta"),
    "--dsv4-o-groups": number("o_groups"),
    "--dsv4-o-lora-rank": number("o_lora_rank"),
    "--dsv4-n-hash-layers": number("num_hash_layers"),
    "--dsv4-window-size": number("sliding_window"),
    # The family
    "--model-name": _FAMILY,
    "--spec": _FAMILY,
    "--custom-model-provider-path": _FAMILY,
}

ANYWAY: dict[str, Meant] = {
    "--train-backend": either("megatron", only="Megatron is the only trainer"),
    "--optimizer": either("adam", only="Adam is the only optimizer"),
    "--hidden-dropout": either("0", only="there is no dropout"),
    "--attention-dropout": either("0", only="there is no dropout"),
    "--attention-softmax-in-fp32": anyway(),
    "--attention-backend": either("flash", "fused", "unfused", "local", "auto"),
    "--dsa-attention-backend": either("megatron", "tilelang"),
    "--linear-attention-backend": either("fla", "flashqla"),
    "--qwen-gdn-backend": anything("it is what is installed"),
    "--miles-dsa-topk-backend": either("torch", "flashinfer"),
    "--allgather-cp": anyway("keys and values are gathered"),
    "--cp-comm-type": either("p2p", "a2a", "all_gather", "allgather", "a2a+p2p"),
    "--qkv-format": either("thd", "bshd", note="micro-batches are packed"),
    "--megatron-to-hf-mode": either("raw", "bridge"),
    "--make-vocab-size-divisible-by": anything(),
    "--padded-vocab-size": anything(),
    "--moe-grouped-gemm": anyway(),
    "--moe-permute-fusion": anyway(),
    "--moe-enable-deepep": anyway("alltoall"),
    "--moe-token-drop-policy": either("probs", "position"),
    "--freeze-e-score-correction-bias": anyway(),
    "--no-rope-fusion": anyway(),
    "--no-masked-softmax-fusion": anyway(),
    "--no-bias-dropout-fusion": anyway(),
    "--no-gradient-accumulation-fusion": anyway(),
    "--no-check-for-nan-in-loss-and-grad": anyway(),
    "--use-cpu-initialization": anyway(),
    "--recompute-loss-function": anyway("logits exist for --log-probs-chunk-size tokens at a time"),
    "--observe-training-entropy": anyway(),
    "--get-mismatch-metrics": anyway(),
    "--enable-experimental": anyway(),
    "--disable-compute-advantages-and-returns": anyway(
        only=lambda v: None if v.loss_type == "sft_loss" else "without advantages there is --loss-type sft_loss alone"
    ),
    "--distributed-backend": either("nccl"),
    "--loss-mask-type": anything("the chat template shows where a turn begins and ends"),
    "--log-probs-max-tokens-per-gpu": anything("as --max-tokens-per-gpu"),
}

MEANT: dict[str, Meant] = MODEL | ANYWAY


def contradictions(flags: Mapping[str, Sequence[str]], v: Values) -> Iterator[str]:
    """What is wrong with such flags, each in a sentence; `flags` has the words behind each."""
    try:
        model = describe(v.hf_checkpoint)
    except Undetermined:
        model = None
    if model is not None and model.traits is None:
        model = None  # refused by a rule of its own
    for flag, words in flags.items():
        if problem := MEANT[flag].contradiction(flag, words, v, model):
            yield problem


def as_named(flag: str) -> str:
    """The flag as the user is told of it, with what is so anyway behind it, if that does not go without saying."""
    note = MEANT[flag].note
    return f"{flag} ({note})" if note else flag


# Flags of Miles that have another name here.
RENAMED = {"--tis-threshold": "--tis-clip"}
