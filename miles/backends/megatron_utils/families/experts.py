"""What families with experts have in common: their weights and a router."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from miles.hf.entries import Entry
from miles.hf.layouts import Gated, Row

GATED_NAMES = ("gate_proj", "up_proj", "down_proj")


def gated_entries(
    hf: str, megatron: str, hidden: int, ffn: int, names: tuple[str, str, str] = GATED_NAMES
) -> list[Entry]:
    """The two parameters of one gated MLP. `hf` and `megatron` are name prefixes, `names` the tensors' own."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    return [
        Entry(Gated(), megatron + "linear_fc1.weight", (gate, up), ((ffn, hidden), (ffn, hidden))),
        Entry(Row(), megatron + "linear_fc2.weight", (down,), ((hidden, ffn),)),
    ]


def expert_entries(
    hf: str,
    megatron: str,
    experts: int,
    hidden: int,
    ffn: int,
    ep_size: int,
    names: tuple[str, str, str] = GATED_NAMES,
) -> list[Entry]:
    """All experts of a layer, each a gated MLP of its own, with their owners among `ep_size` ranks.

    hf: the prefix of the experts' numbers; megatron: that of the parameters that hold a rank's experts.
    """
    local = experts // ep_size
    return [
        replace(entry, ep_rank=expert // local, expert=expert % local)
        for expert in range(experts)
        for entry in gated_entries(f"{hf}{expert}.", megatron, hidden, ffn, names)
    ]


def sigmoid_router(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """TransformerConfig fields of DeepSeek-V3's router: sigmoids, a bias for the selection, groups, a scale."""
    fields = dict(
        moe_router_topk=hf_config.num_experts_per_tok,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        # `ExpertLoad` moves the bias, in steps that are taken.
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=hf_config.routed_scaling_factor,
    )
    if hf_config.n_group > 1:
        fields.update(moe_router_num_groups=hf_config.n_group, moe_router_group_topk=hf_config.topk_group)
    return fields


def sigmoid_router_problems(hf_config: PreTrainedConfig) -> list[str]:
    """What Megatron's sigmoid router cannot express."""
    found, topk = [], hf_config.num_experts_per_tok
    # Megatron divides the chosen scores by their sum exactly where there is more than one.
    if hf_config.norm_topk_prob != (topk > 1):
        found.append(f"norm_topk_prob={hf_config.norm_topk_prob} with num_experts_per_tok={topk} (taken: {topk > 1})")
    # Hugging Face scores a group by its two best experts, Megatron by its best topk // group_topk.
    if hf_config.n_group > 1 and topk // hf_config.topk_group != 2:
        found.append(
            f"n_group={hf_config.n_group} with num_experts_per_tok={topk} and topk_group={hf_config.topk_group} "
            "(taken: two experts of each chosen group)"
        )
    return found
