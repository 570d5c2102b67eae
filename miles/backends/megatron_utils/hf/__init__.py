"""Model families: how Hugging Face configurations, names and layouts map to Megatron's and back, one file a family."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from miles.backends.megatron_utils.hf.base import Entry, Family
from miles.backends.megatron_utils.hf.llama import Llama
from miles.backends.megatron_utils.hf.qwen2 import Qwen2
from miles.backends.megatron_utils.hf.qwen3 import Qwen3
from miles.backends.megatron_utils.hf.vocab import padded_vocab_size

FAMILIES: tuple[Family, ...] = (Llama(), Qwen2(), Qwen3())

__all__ = ["FAMILIES", "Entry", "Family", "family_for", "load_hf_config", "padded_vocab_size"]


def load_hf_config(folder: str | Path) -> PreTrainedConfig:
    """Read `folder`/config.json. Raises ValueError where there is none."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give the local folder of a Hugging Face checkpoint")
    return AutoConfig.from_pretrained(folder)


def family_for(hf_config: PreTrainedConfig) -> Family:
    """The family of a checkpoint, by the first of its architectures, with its configuration checked.

    Raises ValueError for an unknown architecture and for a configuration that the family cannot express.
    """
    known = {name: family for family in FAMILIES for name in family.architectures}
    given = hf_config.architectures
    if not given or given[0] not in known:
        raise ValueError(f"config.json has architectures={given}; supported: {', '.join(sorted(known))}")
    family = known[given[0]]
    family.check(hf_config)
    return family
