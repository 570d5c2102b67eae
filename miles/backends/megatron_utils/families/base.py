"""What a model family is: which configurations it takes, the Megatron model they mean, and how the weights map."""

from collections.abc import Container
from typing import Any

import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.parts.attention import AttentionOptions
from miles.backends.megatron_utils.parts.norms import RMSNorm
from miles.backends.megatron_utils.parts.rope import Rope, rope_of, rope_problems
from miles.backends.megatron_utils.parts.specs import dense_layer
from miles.hf.entries import EMBEDDING, HEAD, Entry, norm_entry
from miles.hf.families import ModelShape, shape_of
from miles.hf.layouts import Gated, Qkv, Row, Vocab
from miles.hf.parallel import ParallelSizes
from miles.hf.quantization import quantization_problem
from miles.utils.errors import UserError


class Family:
    """A decoder of attention and a gated MLP with RMS norms and rotary positions; families override where they differ.

    architectures: the names in a checkpoint's config.json. ignored_suffixes: endings of names that a checkpoint may
    list and that are no weights. config_class: Megatron's configuration. final_norm: the norm before the head.
    post_attention_norm: a layer's name for the norm between attention and residual; None: there is none.
    """

    architectures: tuple[str, ...] = ()
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    config_class: type[TransformerConfig] = TransformerConfig
    final_norm: type = RMSNorm
    post_attention_norm: str | None = None
    qkv_bias = False
    qk_norm = False

    def shape(self, hf_config: PreTrainedConfig) -> ModelShape:
        """What config.json says, in the words of all families."""
        return shape_of(hf_config.to_dict())

    def has_experts(self, hf_config: PreTrainedConfig, layer: int) -> bool:
        """Whether the global `layer` has experts or a dense MLP."""
        return self.shape(hf_config).has_experts(layer)

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        """What Megatron cannot express in `hf_config`: each the field, its value and what is taken."""
        given = hf_config.to_dict()
        found = [
            f"{field}={given[field]!r} (taken: {allowed[0]!r})"
            for field, allowed in self.allowed_values().items()
            if field in given and given[field] not in allowed
        ]
        quantization = quantization_problem(given.get("quantization_config"))
        return found + self.rope_problems(hf_config) + ([quantization] if quantization else [])

    def ignored_prefixes(self, hf_config: PreTrainedConfig) -> tuple[str, ...]:
        """How names begin of weights that a checkpoint may have and that are not trained: layers for further tokens."""
        first, further = hf_config.num_hidden_layers, hf_config.to_dict().get("num_nextn_predict_layers") or 0
        return tuple(f"model.layers.{layer}." for layer in range(first, first + further))

    def rope_problems(self, hf_config: PreTrainedConfig) -> list[str]:
        """What `ropes` cannot make."""
        return rope_problems(hf_config.rope_parameters)

    def allowed_values(self) -> dict[str, tuple]:
        """Configuration fields whose other values change the model in a way that is not supported."""
        return {"hidden_act": ("silu",), "attention_bias": (False, None)}

    def check(self, hf_config: PreTrainedConfig) -> None:
        """Refuse a configuration that the Megatron model cannot express. Raises ValueError with every such field."""
        problems = self.problems(hf_config)
        if problems:
            raise UserError(f"config.json of a {hf_config.architectures[0]} is not supported: " + "; ".join(problems))

    def layout_problems(self, hf_config: PreTrainedConfig, sizes: ParallelSizes) -> list[str]:
        """The parallel sizes that this model cannot have, each with the way out."""
        return self.shape(hf_config).layout_problems(sizes)

    def check_layout(self, hf_config: PreTrainedConfig, sizes: ParallelSizes) -> None:
        """Refuse parallel sizes that this model cannot have. Raises ValueError with every reason."""
        problems = self.layout_problems(hf_config, sizes)
        if problems:
            raise UserError(f"a {hf_config.architectures[0]} cannot be laid out like this: " + "; ".join(problems))

    def has_qkv_bias(self, hf_config: PreTrainedConfig) -> bool:
        """Whether query, key and value have a bias."""
        return self.qkv_bias

    def ffn_size(self, hf_config: PreTrainedConfig) -> int:
        """Width of a dense MLP."""
        return hf_config.intermediate_size

    def head_dim(self, hf_config: PreTrainedConfig) -> int:
        """Width of one attention head."""
        return self.shape(hf_config).head_dim

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        """TransformerConfig fields that describe the model; parallelism, precision and dropout are the caller's."""
        return dict(
            num_layers=hf_config.num_hidden_layers,
            hidden_size=hf_config.hidden_size,
            ffn_hidden_size=self.ffn_size(hf_config),
            num_attention_heads=hf_config.num_attention_heads,
            num_query_groups=hf_config.num_key_value_heads,
            kv_channels=self.head_dim(hf_config),
            normalization="RMSNorm",
            layernorm_epsilon=hf_config.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=self.has_qkv_bias(hf_config),
            qk_layernorm=self.qk_norm,
        )

    def gpt_kwargs(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        """Arguments of Megatron's GPTModel that describe the model; the vocabulary is not padded."""
        return dict(
            vocab_size=hf_config.vocab_size,
            max_sequence_length=hf_config.max_position_embeddings,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        )

    def ropes(self, hf_config: PreTrainedConfig) -> dict[str, Rope]:
        """The rotary embeddings that the layers' options name."""
        return {"default": rope_of(hf_config)}

    def attention_options(self, hf_config: PreTrainedConfig, layer: int) -> AttentionOptions:
        """What differs from plain causal attention in the global `layer`, counted from 0."""
        return AttentionOptions()

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        """The global `layer`, counted from 0."""
        return dense_layer(megatron_config, self.attention_options(hf_config, layer))

    def after_build(self, hf_config: PreTrainedConfig, model: GPTModel) -> None:
        """Add what no specification reaches (hooks on embedding and head) to a model chunk."""

    def entries(
        self, hf_config: PreTrainedConfig, layers: range, first_stage: bool, last_stage: bool, ep_size: int = 1
    ) -> list[Entry]:
        """Every parameter of a model chunk that holds the global `layers`, in the model's order.

        first_stage, last_stage: the chunk has the embedding, and final norm and head. Of experts all are listed, with
        their owners among `ep_size` ranks.
        """
        table = ((hf_config.vocab_size, hf_config.hidden_size),)
        vocab = Vocab(hf_config.vocab_size)
        found = []
        if first_stage:
            found.append(Entry(vocab, "embedding.word_embeddings.weight", (EMBEDDING,), table))
        for local, layer in enumerate(layers):
            hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{local}."
            found += self.layer_entries(hf_config, layer, hf, megatron, ep_size)
        if last_stage:
            found.append(norm_entry("decoder.final_layernorm.weight", "model.norm.weight", hf_config.hidden_size))
            if not hf_config.tie_word_embeddings:
                found.append(Entry(vocab, "output_layer.weight", (HEAD,), table))
            elif not first_stage:
                found.append(Entry(vocab, "output_layer.weight", (EMBEDDING,), table, load_only=True))
        return found

    def renamed(self, entries: list[Entry], names: Container[str]) -> list[Entry]:
        """`entries` by the checkpoint's own names, all of which are in `names`, where a family has several sets."""
        return entries

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        """The global `layer`. `hf` and `megatron` are its name prefixes."""
        return self.attention_entries(hf_config, hf, megatron) + self.mlp_entries(hf_config, hf, megatron)

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
        if self.has_qkv_bias(hf_config):
            found.append(Entry(qkv, attention + "linear_qkv.bias", biases, tuple((r,) for r in rows)))
        if self.qk_norm:
            found.append(norm_entry(attention + "q_layernorm.weight", attn + "q_norm.weight", head_dim))
            found.append(norm_entry(attention + "k_layernorm.weight", attn + "k_norm.weight", head_dim))
        found.append(Entry(Row(), attention + "linear_proj.weight", (attn + "o_proj.weight",), ((hidden, rows[0]),)))
        if self.post_attention_norm is not None:
            post = attention + "linear_proj.post_layernorm.weight"
            found.append(norm_entry(post, hf + self.post_attention_norm + ".weight", hidden))
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


def layer_window(hf_config: PreTrainedConfig, layer: int) -> int | None:
    """The tokens that the global `layer` sees, itself included; None for all before it."""
    return hf_config.sliding_window if hf_config.layer_types[layer] == "sliding_attention" else None


def layer_type_problems(hf_config: PreTrainedConfig) -> list[str]:
    """Kinds of layers other than full attention and sliding windows."""
    other = sorted(set(hf_config.layer_types) - {"full_attention", "sliding_attention"})
    return [f"layer_types={other} (taken: 'full_attention', 'sliding_attention')"] if other else []
