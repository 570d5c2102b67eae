"""What a model family is: which configurations it takes, the Megatron model they mean, and how the weights map."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.hf.layouts import Gated, Layout, Qkv, Replicated, Row, Vocab

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    megatron_name: as in the stage's model, whose layers count from 0. hf_names, shapes: the full tensors, as the
    checkpoint has them. load_only: a copy of a tensor that another stage owns (the tied head): loaded, never gathered.
    """

    kind: Layout
    megatron_name: str
    hf_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    load_only: bool = False


class Family:
    """A decoder of attention and a gated MLP with RMS norms and rotary positions; families override where they differ.

    architectures: the names in a checkpoint's config.json. ignored_suffixes: endings of names that a checkpoint may
    list and that are no weights.
    """

    architectures: tuple[str, ...] = ()
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    qkv_bias = False
    qk_norm = False

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        """What Megatron cannot express in `hf_config`: each the field, its value and what is taken."""
        given = hf_config.to_dict()
        found = [
            f"{field}={given[field]!r} (taken: {allowed[0]!r})"
            for field, allowed in self.allowed_values().items()
            if field in given and given[field] not in allowed
        ]
        return found + rope_problems(hf_config)

    def allowed_values(self) -> dict[str, tuple]:
        """Configuration fields whose other values change the model in a way that is not supported."""
        return {"hidden_act": ("silu",), "attention_bias": (False, None), "quantization_config": (None,)}

    def check(self, hf_config: PreTrainedConfig) -> None:
        """Refuse a configuration that the Megatron model cannot express. Raises ValueError with every such field."""
        problems = self.problems(hf_config)
        if problems:
            raise ValueError(f"config.json of a {hf_config.architectures[0]} is not supported: " + "; ".join(problems))

    def head_dim(self, hf_config: PreTrainedConfig) -> int:
        """Width of one attention head; Hugging Face derives it where config.json does not give it."""
        return hf_config.to_dict().get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        """TransformerConfig fields that describe the model; parallelism, precision and dropout are the caller's."""
        return dict(
            num_layers=hf_config.num_hidden_layers,
            hidden_size=hf_config.hidden_size,
            ffn_hidden_size=hf_config.intermediate_size,
            num_attention_heads=hf_config.num_attention_heads,
            num_query_groups=hf_config.num_key_value_heads,
            kv_channels=self.head_dim(hf_config),
            normalization="RMSNorm",
            layernorm_epsilon=hf_config.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
        )

    def gpt_kwargs(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        """Arguments of Megatron's GPTModel that describe the model (rotary positions); the vocabulary is not padded."""
        rope = hf_config.rope_parameters
        scaling = {}
        if rope["rope_type"] == "llama3":
            scaling = dict(rope_scaling=True, rope_scaling_factor=rope["factor"])
        return dict(
            vocab_size=hf_config.vocab_size,
            max_sequence_length=hf_config.max_position_embeddings,
            rotary_base=rope["rope_theta"],
            rotary_percent=rope.get("partial_rotary_factor", 1.0),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            **scaling,
        )

    def entries(self, hf_config: PreTrainedConfig, layers: range, first_stage: bool, last_stage: bool) -> list[Entry]:
        """Every parameter of a pipeline stage that holds the global `layers`, in the model's order."""
        table = ((hf_config.vocab_size, hf_config.hidden_size),)
        vocab = Vocab(hf_config.vocab_size)
        found = []
        if first_stage:
            found.append(Entry(vocab, "embedding.word_embeddings.weight", (EMBEDDING,), table))
        for local, layer in enumerate(layers):
            hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{local}."
            found += self.attention_entries(hf_config, hf, megatron) + self.mlp_entries(hf_config, hf, megatron)
        if last_stage:
            found.append(norm_entry("decoder.final_layernorm.weight", "model.norm.weight", hf_config.hidden_size))
            if not hf_config.tie_word_embeddings:
                found.append(Entry(vocab, "output_layer.weight", (HEAD,), table))
            elif not first_stage:
                found.append(Entry(vocab, "output_layer.weight", (EMBEDDING,), table, load_only=True))
        return found

    def attention_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        """A layer's attention and the norm before it. `hf` and `megatron` are the layer's name prefixes."""
        hidden, head_dim = hf_config.hidden_size, self.head_dim(hf_config)
        heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
        rows = (heads * head_dim, groups * head_dim, groups * head_dim)
        qkv = Qkv(groups, heads // groups, head_dim)
        attn, attention = hf + "self_attn.", megatron + "self_attention."
        weights = tuple(attn + f"{part}_proj.weight" for part in "qkv")
        biases = tuple(attn + f"{part}_proj.bias" for part in "qkv")
        found = [
            norm_entry(megatron + "input_layernorm.weight", hf + "input_layernorm.weight", hidden),
            Entry(qkv, attention + "linear_qkv.weight", weights, tuple((r, hidden) for r in rows)),
        ]
        if self.qkv_bias:
            found.append(Entry(qkv, attention + "linear_qkv.bias", biases, tuple((r,) for r in rows)))
        if self.qk_norm:
            found.append(norm_entry(attention + "q_layernorm.weight", attn + "q_norm.weight", head_dim))
            found.append(norm_entry(attention + "k_layernorm.weight", attn + "k_norm.weight", head_dim))
        found.append(Entry(Row(), attention + "linear_proj.weight", (attn + "o_proj.weight",), ((hidden, rows[0]),)))
        return found

    def mlp_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        """A layer's MLP and the norm before it. `hf` and `megatron` are the layer's name prefixes."""
        hidden, ffn = hf_config.hidden_size, hf_config.intermediate_size
        gated = (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")
        return [
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(Gated(), megatron + "mlp.linear_fc1.weight", gated, ((ffn, hidden), (ffn, hidden))),
            Entry(Row(), megatron + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), ((hidden, ffn),)),
        ]


def norm_entry(megatron_name: str, hf_name: str, size: int) -> Entry:
    """A norm's weight of `size` elements, whole on every rank."""
    return Entry(Replicated(), megatron_name, (hf_name,), ((size,),))


# megatron.core RotaryEmbedding._apply_scaling takes only the factor; these three are constants in its source.
MEGATRON_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def rope_problems(hf_config: PreTrainedConfig) -> list[str]:
    """What the rotary settings ask for that Megatron's rotary embedding cannot do."""
    rope = hf_config.rope_parameters
    kind = rope["rope_type"]
    if kind == "llama3":
        return [
            f"rope_parameters.{field}={rope[field]!r} (taken: {value!r}, fixed in Megatron)"
            for field, value in MEGATRON_LLAMA3_ROPE.items()
            if rope[field] != value
        ]
    return [] if kind == "default" else [f"rope_parameters.rope_type={kind!r} (taken: 'default', 'llama3')"]


def sliding_window_problems(hf_config: PreTrainedConfig) -> list[str]:
    """Layers that attend to a window only: the attention here attends to the whole sequence."""
    windowed = sum(kind != "full_attention" for kind in hf_config.layer_types)
    if not windowed:
        return []
    return [f"use_sliding_window=True with window {hf_config.sliding_window} on {windowed} layers (taken: False)"]
