"""Qwen3.5, dense and with experts: the language model, alone or as a part of the model that sees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.qwen3_next import GatedDeltaFamily
from miles.hf.entries import Entry
from miles.hf.layouts import Row, Sections

# Cuts dimension 1 of [experts, ..., ...] evenly.
_INNER = Row()


@dataclass(frozen=True)
class StackedGateUp:
    """Gate and up projections of experts, [E, 2F, H], gate first; a rank holds its gate rows, then its up rows."""

    sharded = True

    def split(self, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
        (joined_EOH,) = tensors
        return torch.cat([_INNER.split((half,), tp_rank, tp_size) for half in joined_EOH.chunk(2, dim=1)], dim=1)

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        halves = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
        return [torch.cat([_INNER.merge(half)[0] for half in halves], dim=1)]


@dataclass(frozen=True)
class StackedDown:
    """Down projections of experts, [E, H, F], F cut evenly."""

    sharded = True

    def split(self, tensors: Sequence[torch.Tensor], tp_rank: int, tp_size: int) -> torch.Tensor:
        (down_EHF,) = tensors
        return _INNER.split((down_EHF.transpose(1, 2),), tp_rank, tp_size).transpose(1, 2)

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (down_EFH,) = _INNER.merge([shard_EHF.transpose(1, 2) for shard_EHF in shards])
        return [down_EFH.transpose(1, 2)]


def sees(hf_config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is of the whole model. Its vision part is not trained."""
    return hf_config.architectures[0].endswith("ForConditionalGeneration")


class Qwen3_5(GatedDeltaFamily):
    """Qwen3-Next's layers with dense MLPs; the delta net's projections are stored apart.

    Positions of text are the same in all three of its rope's sections, so that it is a plain rope.
    """

    architectures = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")

    def ignored_prefixes(self, hf_config: PreTrainedConfig) -> tuple[str, ...]:
        return (*super().ignored_prefixes(hf_config), "model.visual.")

    def entries(
        self, hf_config: PreTrainedConfig, layers: range, first_stage: bool, last_stage: bool, ep_size: int = 1
    ) -> list[Entry]:
        found = super().entries(hf_config, layers, first_stage, last_stage, ep_size)
        return [_within_whole(entry) for entry in found] if sees(hf_config) else found

    def in_proj_entry(self, hf_config: PreTrainedConfig, megatron_name: str, linear: str) -> Entry:
        heads = hf_config.linear_num_value_heads
        key, value = self.delta_net_rows(hf_config)
        sections = ((key, key, value), (value,), (heads,), (heads,))
        names = tuple(f"{linear}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        shapes = tuple((sum(rows), hf_config.hidden_size) for rows in sections)
        return Entry(Sections(sections), megatron_name, names, shapes)


class Qwen3_5Moe(Qwen3_5):
    """The same with experts in every layer.

    The whole model's checkpoints hold a layer's experts in one tensor, those of the language model alone, which
    transformers writes, hold each by itself.
    """

    architectures = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")

    def problems(self, hf_config: PreTrainedConfig) -> list[str]:
        found = super().problems(hf_config)
        if hf_config.num_experts_per_tok == 1:
            found.append("num_experts_per_tok=1 (taken: 2 or more, as their scores add up to one)")
        return found

    def ffn_size(self, hf_config: PreTrainedConfig) -> int:
        return hf_config.moe_intermediate_size

    def expert_entries(self, hf_config: PreTrainedConfig, hf: str, megatron: str, ep_size: int) -> list[Entry]:
        if not sees(hf_config):
            return super().expert_entries(hf_config, hf, megatron, ep_size)
        hidden, experts, ffn = hf_config.hidden_size, hf_config.num_experts, hf_config.moe_intermediate_size
        own = megatron + "local_experts.{}."
        gate_up, down = (experts, 2 * ffn, hidden), (experts, hidden, ffn)
        return [
            Entry(StackedGateUp(), own + "linear_fc1.weight", (hf + "gate_up_proj",), (gate_up,), stacked=True),
            Entry(StackedDown(), own + "linear_fc2.weight", (hf + "down_proj",), (down,), stacked=True),
        ]


def _within_whole(entry: Entry) -> Entry:
    names = (name.replace("model.", "model.language_model.", 1) for name in entry.hf_names)
    return replace(entry, hf_names=tuple(names))
