"""DeepSeek-V4: compressed attention, hyper-connections, experts that are fixed by token in the first layers."""

from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.experts import expert_entries, gated_entries
from miles.backends.megatron_utils.parts.compressed_attention import compressed_spec
from miles.backends.megatron_utils.parts.compressed_config import CompressedConfig, Compression
from miles.backends.megatron_utils.parts.hash_router import HashRouter
from miles.backends.megatron_utils.parts.hyper_connections import HyperHead, HyperLayer
from miles.backends.megatron_utils.parts.rope import Rope, rope_of, rope_problems
from miles.backends.megatron_utils.parts.specs import layer_of, moe_mlp
from miles.hf.entries import Entry, norm_entry
from miles.hf.families.deepseek_v4 import HEAVY, SPARSE, WINDOW, repackaged_name
from miles.hf.layouts import Column, Layout, Replicated, Row, Vocab

EMBEDDING = "embed.weight"
EXPERT_NAMES = ("w1", "w3", "w2")
ROPES = ("main", "compress")
HASH, MOE = "hash_moe", "moe"


class DeepseekV4(Family):
    """Every layer has experts. Indexer, tables of experts and selection biases are kept as they are, never trained."""

    architectures = ("DeepseekV4ForCausalLM",)
    config_class = CompressedConfig
    final_norm = HyperHead
    qk_norm = True

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config)
        for field, taken in (("layer_types", (WINDOW, SPARSE, HEAVY)), ("mlp_layer_types", (HASH, MOE))):
            other = sorted(set(getattr(hf_config, field)) - set(taken))
            if other:
                found.append(f"{field}={other} (taken: {', '.join(map(repr, taken))})")
        if hf_config.num_experts_per_tok < 2:
            # Megatron divides the chosen scores by their sum where there is more than one.
            found.append(f"num_experts_per_tok={hf_config.num_experts_per_tok} (taken: 2 or more)")
        return found

    def rope_problems(self, hf_config: PreTrainedConfig) -> list[str]:
        return [
            problem
            for name in ROPES
            for problem in rope_problems(hf_config.rope_parameters[name], f"rope_parameters.{name}")
        ]

    def allowed_values(self) -> dict[str, tuple]:
        return super().allowed_values() | {
            "scoring_func": ("sqrtsoftplus",),
            # Not a field of transformers; published checkpoints list it.
            "topk_method": ("noaux_tc", None),
            "norm_topk_prob": (True,),
            "n_shared_experts": (1,),
            "num_key_value_heads": (1,),
            "tie_word_embeddings": (False,),
            "mlp_bias": (False, None),
        }

    def ignored_prefixes(self, hf_config: PreTrainedConfig) -> tuple[str, ...]:
        first, further = hf_config.num_hidden_layers, hf_config.num_nextn_predict_layers
        return tuple(
            prefix for number in range(further) for prefix in (f"mtp.{number}.", f"model.layers.{first + number}.")
        )

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        return super().transformer_config(hf_config) | dict(
            # One key serves all heads; Megatron would cut it.
            num_query_groups=hf_config.num_attention_heads,
            activation_func_clamp_value=hf_config.swiglu_limit,
            num_moe_experts=hf_config.n_routed_experts,
            moe_ffn_hidden_size=hf_config.moe_intermediate_size,
            moe_shared_expert_intermediate_size=hf_config.moe_intermediate_size,
            moe_router_topk=hf_config.num_experts_per_tok,
            moe_router_score_function="sqrtsoftplus",
            moe_router_enable_expert_bias=True,
            # `ExpertLoad` moves the bias, in steps that are taken.
            moe_router_bias_update_rate=0.0,
            moe_router_topk_scaling_factor=hf_config.routed_scaling_factor,
            hyper_streams=hf_config.hc_mult,
            hyper_iterations=hf_config.hc_sinkhorn_iters,
            hyper_epsilon=hf_config.hc_eps,
            q_lora_rank=hf_config.q_lora_rank,
            output_groups=hf_config.o_groups,
            output_rank=hf_config.o_lora_rank,
            attention_window=hf_config.sliding_window,
            index_heads=hf_config.index_n_heads,
            index_size=hf_config.index_head_dim,
            compressions=tuple(_compression(hf_config, kind) for kind in hf_config.layer_types),
            hash_layers=tuple(kind == HASH for kind in hf_config.mlp_layer_types),
        )

    def ffn_size(self, hf_config: PreTrainedConfig) -> int:
        return hf_config.moe_intermediate_size

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        size = hf_config.qk_rope_head_dim
        return {name: rope_of(hf_config, hf_config.rope_parameters[name], interleaved=True, dim=size) for name in ROPES}

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: CompressedConfig, layer: int) -> ModuleSpec:
        hashed = megatron_config.hash_layers[layer]
        router = partial(HashRouter, vocab_size=hf_config.vocab_size) if hashed else TopKRouter
        spec = layer_of(compressed_spec(megatron_config.compressions[layer]), moe_mlp(router=router))
        spec.module = HyperLayer
        return spec

    def entries(
        self, hf_config: PreTrainedConfig, layers: range, first_stage: bool, last_stage: bool, ep_size: int = 1
    ) -> list[Entry]:
        hidden, count, vocab = hf_config.hidden_size, hf_config.hc_mult, Vocab(hf_config.vocab_size)
        found = []
        if first_stage:
            table = "embedding.word_embeddings.weight"
            found.append(_entry(vocab, table, EMBEDDING, hf_config.vocab_size, hidden))
        for local, layer in enumerate(layers):
            found += self.layer_entries(hf_config, layer, f"layers.{layer}.", f"decoder.layers.{local}.", ep_size)
        if last_stage:
            last = "decoder.final_layernorm."
            found += [
                _whole(last + "head_weight", "hc_head_fn", count, count * hidden),
                _whole(last + "head_base", "hc_head_base", count),
                _whole(last + "head_scale", "hc_head_scale", 1),
                norm_entry(last + "norm.weight", "norm.weight", hidden),
                _entry(vocab, "output_layer.weight", "head.weight", hf_config.vocab_size, hidden),
            ]
        return found

    def renamed(self, entries: list[Entry], names: Container[str]) -> list[Entry]:
        if repackaged_name(EMBEDDING) not in names:
            return entries
        return [replace(entry, hf_names=tuple(map(repackaged_name, entry.hf_names))) for entry in entries]

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        hidden = hf_config.hidden_size
        return [
            *self.hyper_entries(hf_config, hf, megatron),
            norm_entry(megatron + "input_layernorm.weight", hf + "attn_norm.weight", hidden),
            *self.compressed_entries(hf_config, layer, hf + "attn.", megatron + "self_attention."),
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "ffn_norm.weight", hidden),
            *self.moe_entries(hf_config, layer, hf + "ffn.", megatron + "mlp.", ep_size),
        ]

    def hyper_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        """The hyper-connections of a layer. `hf` and `megatron` are its name prefixes."""
        count = hf_config.hc_mult
        numbers = count * (2 + count)
        return [
            entry
            for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))
            for entry in (
                _whole(f"{megatron}{ours}_hyper.weight", f"{hf}hc_{theirs}_fn", numbers, count * hf_config.hidden_size),
                _whole(f"{megatron}{ours}_hyper.base", f"{hf}hc_{theirs}_base", numbers),
                _whole(f"{megatron}{ours}_hyper.scale", f"{hf}hc_{theirs}_scale", 3),
            )
        ]

    def moe_entries(self, hf_config: PreTrainedConfig, layer: int, ffn: str, mlp: str, ep_size: int) -> list[Entry]:
        """The router and the experts of a layer. `ffn` and `mlp` are their name prefixes."""
        hidden, experts, size = hf_config.hidden_size, hf_config.n_routed_experts, hf_config.moe_intermediate_size
        if hf_config.mlp_layer_types[layer] == HASH:
            table = (hf_config.vocab_size, hf_config.num_experts_per_tok)
            choice = _whole(mlp + "router.expert_of_token", ffn + "gate.tid2eid", *table)
        else:
            choice = _whole(mlp + "router.expert_bias", ffn + "gate.bias", experts)
        return [
            _whole(mlp + "router.weight", ffn + "gate.weight", experts, hidden),
            choice,
            *gated_entries(ffn + "shared_experts.", mlp + "shared_experts.", hidden, size, EXPERT_NAMES),
            *expert_entries(ffn + "experts.", mlp + "experts.", experts, hidden, size, ep_size, EXPERT_NAMES),
        ]

    def compressed_entries(self, hf_config: PreTrainedConfig, layer: int, attn: str, attention: str) -> list[Entry]:
        """A layer's attention. `attn` and `attention` are its name prefixes."""
        hidden, latent, size = hf_config.hidden_size, hf_config.q_lora_rank, hf_config.head_dim
        heads, groups, rank = hf_config.num_attention_heads, hf_config.o_groups, hf_config.o_lora_rank
        compression = _compression(hf_config, hf_config.layer_types[layer])
        # SGLang multiplies by both in one product, and refuses one that comes without the other.
        found = [
            _whole(attention + "linear_q_down_proj.weight", attn + "wq_a.weight", latent, hidden, atomic=attn),
            norm_entry(attention + "q_layernorm.weight", attn + "q_norm.weight", latent),
            _entry(Column(), attention + "linear_q_up_proj.weight", attn + "wq_b.weight", heads * size, latent),
            _whole(attention + "linear_kv_proj.weight", attn + "wkv.weight", size, hidden, atomic=attn),
            norm_entry(attention + "kv_layernorm.weight", attn + "kv_norm.weight", size),
            _entry(Column(), attention + "softmax_offset", attn + "attn_sink", heads),
            _entry(Column(), attention + "group_proj", attn + "wo_a.weight", groups * rank, heads * size // groups),
            _entry(Row(), attention + "linear_proj.weight", attn + "wo_b.weight", hidden, groups * rank),
        ]
        if compression is None:
            return found
        found += _compressor(attention + "compressor.", attn + "compressor.", compression, size, hidden)
        if compression.topk is None:
            return found
        ours, theirs = attention + "indexer.", attn + "indexer."
        heads, size = hf_config.index_n_heads, hf_config.index_head_dim
        return [
            *found,
            _whole(ours + "linear_wq_b.weight", theirs + "wq_b.weight", heads * size, latent),
            _whole(ours + "linear_weights_proj.weight", theirs + "weights_proj.weight", heads, hidden),
            *_compressor(ours + "compressor.", theirs + "compressor.", compression, size, hidden),
        ]


def _compression(hf_config: PreTrainedConfig, kind: str) -> Compression | None:
    """How a layer of this kind compresses."""
    if kind == WINDOW:
        return None
    sparse = kind == SPARSE
    return Compression(hf_config.compress_rates[kind], sparse, hf_config.index_topk if sparse else None)


def _compressor(ours: str, theirs: str, compression: Compression, size: int, hidden: int) -> list[Entry]:
    rows = 2 * size if compression.overlap else size
    return [
        # As above.
        _whole(ours + "linear_kv.weight", theirs + "wkv.weight", rows, hidden, atomic=theirs),
        _whole(ours + "linear_gate.weight", theirs + "wgate.weight", rows, hidden, atomic=theirs),
        _whole(ours + "position_bias", theirs + "ape", compression.ratio, rows),
        norm_entry(ours + "norm.weight", theirs + "norm.weight", size),
    ]


def _whole(megatron_name: str, hf_name: str, *shape: int, atomic: str | None = None) -> Entry:
    """A tensor that every rank holds."""
    return Entry(Replicated(), megatron_name, (hf_name,), (shape,), atomic=atomic)


def _entry(kind: Layout, megatron_name: str, hf_name: str, *shape: int) -> Entry:
    return Entry(kind, megatron_name, (hf_name,), (shape,))
