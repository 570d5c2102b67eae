"""Qwen3.5, dense and with experts: the language model, alone or as a part of the model that sees."""

from dataclasses import replace

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.qwen3_next import GatedDeltaFamily
from miles.hf.entries import Entry
from miles.hf.expert_layouts import StackedDown, StackedGateUp
from miles.hf.layouts import Sections


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
        gate_up, down = (experts, 2 * ffn, hidden), (experts, hidden, ffn)
        return [
            Entry(StackedGateUp(), megatron + "linear_fc1.weight", (hf + "gate_up_proj",), (gate_up,), stacked=True),
            Entry(StackedDown(), megatron + "linear_fc2.weight", (hf + "down_proj",), (down,), stacked=True),
        ]


def _within_whole(entry: Entry) -> Entry:
    names = (name.replace("model.", "model.language_model.", 1) for name in entry.hf_names)
    return replace(entry, hf_names=tuple(names))
