"""Qwen3-Next: gated delta nets and gated attention in turn, experts with a shared one."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.experts import expert_entries, gated_entries
from miles.backends.megatron_utils.parts.gated_delta_net import gated_delta_net_spec, kernel_problems
from miles.backends.megatron_utils.parts.norms import PlusOneNorm
from miles.backends.megatron_utils.parts.specs import attention_spec, dense_layer, moe_layer
from miles.hf.entries import Entry, norm_entry
from miles.hf.layouts import Column, GatedQkv, Replicated, Row, Sections
from miles.hf.parallel import ParallelSizes

LAYER_TYPES = {"full_attention", "linear_attention"}


class GatedDeltaFamily(Family):
    """What Qwen3-Next and Qwen3.5 have in common: norms of weight + 1, and the two kinds of layers."""

    final_norm = PlusOneNorm
    qk_norm = True

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        other = sorted(set(hf_config.layer_types) - LAYER_TYPES)
        allowed = ", ".join(map(repr, sorted(LAYER_TYPES)))
        found = [f"layer_types={other} (taken: {allowed})"] if other else []
        keys, values = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
        if values % keys:
            found.append(f"linear_num_value_heads={values} (taken: a multiple of linear_num_key_heads={keys})")
        return super().problems(hf_config) + found

    def ignored_prefixes(self, hf_config: PreTrainedConfig) -> tuple[str, ...]:
        return ("mtp.",)

    def layout_problems(self, hf_config: PreTrainedConfig, sizes: ParallelSizes) -> list[str]:
        return kernel_problems() + super().layout_problems(hf_config, sizes)

    def transformer_config(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        fields = super().transformer_config(hf_config) | dict(
            attention_output_gate=True,
            linear_conv_kernel_dim=hf_config.linear_conv_kernel_dim,
            linear_key_head_dim=hf_config.linear_key_head_dim,
            linear_value_head_dim=hf_config.linear_value_head_dim,
            linear_num_key_heads=hf_config.linear_num_key_heads,
            linear_num_value_heads=hf_config.linear_num_value_heads,
        )
        if not self.shape(hf_config).num_experts:
            return fields
        return fields | dict(
            num_moe_experts=hf_config.num_experts,
            moe_ffn_hidden_size=hf_config.moe_intermediate_size,
            moe_router_topk=hf_config.num_experts_per_tok,
            moe_router_pre_softmax=not self.normalizes_scores(hf_config),
            moe_shared_expert_intermediate_size=hf_config.shared_expert_intermediate_size,
            moe_shared_expert_gate=True,
        )

    def normalizes_scores(self, hf_config: PreTrainedConfig) -> bool:
        """Whether the scores of a token's experts add up to one."""
        return True

    def layer_spec(self, hf_config: PreTrainedConfig, megatron_config: TransformerConfig, layer: int) -> ModuleSpec:
        if hf_config.layer_types[layer] == "linear_attention":
            attention = gated_delta_net_spec()
        else:
            options = self.attention_options(hf_config, layer)
            attention = attention_spec(megatron_config, options, q_norm=PlusOneNorm, k_norm=PlusOneNorm)
        build = moe_layer if self.has_experts(hf_config, layer) else dense_layer
        return build(megatron_config, attention=attention, norm=PlusOneNorm)

    def layer_entries(
        self, hf_config: PreTrainedConfig, layer: int, hf: str, megatron: str, ep_size: int
    ) -> list[Entry]:
        if hf_config.layer_types[layer] == "linear_attention":
            found = self.delta_net_entries(hf_config, hf, megatron)
        else:
            found = self.attention_entries(hf_config, hf, megatron)
        if self.has_experts(hf_config, layer):
            return found + self.expert_mlp_entries(hf_config, hf, megatron, ep_size)
        return found + self.mlp_entries(hf_config, hf, megatron)

    def attention_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        hidden, head_dim = hf_config.hidden_size, self.head_dim(hf_config)
        heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
        names = tuple(f"{hf}self_attn.{part}_proj.weight" for part in "qkv")
        shapes = tuple((rows * head_dim, hidden) for rows in (2 * heads, groups, groups))
        fused = Entry(
            GatedQkv(groups, heads // groups, head_dim), megatron + "self_attention.linear_qkv.weight", names, shapes
        )
        plain = super().attention_entries(hf_config, hf, megatron)
        return [fused if entry.megatron_name == fused.megatron_name else entry for entry in plain]

    def delta_net_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str) -> list[Entry]:
        """A layer's gated delta net and the norm before it. `hf` and `megatron` are the layer's name prefixes."""
        hidden, heads = hf_config.hidden_size, hf_config.linear_num_value_heads
        key, value = self.delta_net_rows(hf_config)
        net, linear = megatron + "self_attention.", hf + "linear_attn."
        conv = (2 * key + value, 1, hf_config.linear_conv_kernel_dim)
        return [
            norm_entry(megatron + "input_layernorm.weight", hf + "input_layernorm.weight", hidden),
            Entry(Column(), net + "dt_bias", (linear + "dt_bias",), ((heads,),)),
            Entry(Column(), net + "A_log", (linear + "A_log",), ((heads,),)),
            self.in_proj_entry(hf_config, net + "in_proj.weight", linear),
            Entry(Sections(((key, key, value),)), net + "conv1d.weight", (linear + "conv1d.weight",), (conv,)),
            norm_entry(net + "out_norm.weight", linear + "norm.weight", hf_config.linear_value_head_dim),
            Entry(Row(), net + "out_proj.weight", (linear + "out_proj.weight",), ((hidden, value),)),
        ]

    def delta_net_rows(self, hf_config: PreTrainedConfig) -> tuple[int, int]:
        """Rows of all keys (and of all queries), and of all values (and of their gates)."""
        return (
            hf_config.linear_num_key_heads * hf_config.linear_key_head_dim,
            hf_config.linear_num_value_heads * hf_config.linear_value_head_dim,
        )

    def in_proj_entry(self, hf_config: PreTrainedConfig, megatron_name: str, linear: str) -> Entry:
        """The net's first projection: queries, keys, values, gates, betas and alphas. `linear` is its name prefix."""
        raise NotImplementedError

    def expert_mlp_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str, ep_size: int) -> list[Entry]:
        """A layer's experts, the shared one, the router and the norm before them."""
        hidden, experts, shared = (
            hf_config.hidden_size,
            hf_config.num_experts,
            hf_config.shared_expert_intermediate_size,
        )
        hf_mlp, mlp = hf + "mlp.", megatron + "mlp."
        gate = Entry(
            Replicated(), mlp + "shared_experts.gate_weight", (hf_mlp + "shared_expert_gate.weight",), ((1, hidden),)
        )
        return [
            norm_entry(megatron + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", hidden),
            Entry(Replicated(), mlp + "router.weight", (hf_mlp + "gate.weight",), ((experts, hidden),)),
            *self.expert_entries(hf_config, hf_mlp + "experts.", mlp + "experts.", ep_size),
            gate,
            *gated_entries(hf_mlp + "shared_expert.", mlp + "shared_experts.", hidden, shared),
        ]

    def expert_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str, ep_size: int) -> list[Entry]:
        """A layer's experts but the shared one. `hf` and `megatron` are their name prefixes."""
        experts, ffn = hf_config.num_experts, hf_config.moe_intermediate_size
        return expert_entries(hf, megatron, experts, hf_config.hidden_size, ffn, ep_size)


class Qwen3Next(GatedDeltaFamily):
    """Experts in most layers; the delta net's projections are stored by key head."""

    architectures = ("Qwen3NextForCausalLM",)

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config)
        if hf_config.num_experts_per_tok == 1 and hf_config.norm_topk_prob:
            found.append("norm_topk_prob=True with num_experts_per_tok=1 (taken: False, or more experts a token)")
        return found

    def normalizes_scores(self, hf_config: PreTrainedConfig) -> bool:
        return hf_config.norm_topk_prob

    def in_proj_entry(self, hf_config: PreTrainedConfig, megatron_name: str, linear: str) -> Entry:
        hidden, groups, heads = (
            hf_config.hidden_size,
            hf_config.linear_num_key_heads,
            hf_config.linear_num_value_heads,
        )
        key, value = self.delta_net_rows(hf_config)
        by_head = ((key, key, value, value), (heads, heads))
        kind = Sections(tuple(tuple(rows // groups for rows in sections) for sections in by_head), groups)
        names = (linear + "in_proj_qkvz.weight", linear + "in_proj_ba.weight")
        return Entry(kind, megatron_name, names, tuple((sum(sections), hidden) for sections in by_head))
