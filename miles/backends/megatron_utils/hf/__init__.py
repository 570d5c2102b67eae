"""Model families: how Hugging Face configurations, names and layouts map to Megatron's and back, one file a family."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from miles.backends.megatron_utils.hf.base import Entry, Family
from miles.backends.megatron_utils.hf.deepseek_v3 import DeepseekV3
from miles.backends.megatron_utils.hf.deepseek_v32 import DeepseekV32
from miles.backends.megatron_utils.hf.gemma2 import Gemma2
from miles.backends.megatron_utils.hf.gemma3 import Gemma3
from miles.backends.megatron_utils.hf.glm4 import Glm4
from miles.backends.megatron_utils.hf.glm4_moe import Glm4Moe
from miles.backends.megatron_utils.hf.glm4_moe_lite import Glm4MoeLite
from miles.backends.megatron_utils.hf.gpt_oss import GptOss
from miles.backends.megatron_utils.hf.llama import Llama
from miles.backends.megatron_utils.hf.llama4 import Llama4
from miles.backends.megatron_utils.hf.minimax_m2 import MiniMaxM2
from miles.backends.megatron_utils.hf.mistral import Ministral, Ministral3, Mistral
from miles.backends.megatron_utils.hf.qwen2 import Qwen2
from miles.backends.megatron_utils.hf.qwen3 import Qwen3
from miles.backends.megatron_utils.hf.qwen3_5 import Qwen3_5, Qwen3_5Moe
from miles.backends.megatron_utils.hf.qwen3_moe import Qwen3Moe
from miles.backends.megatron_utils.hf.qwen3_next import Qwen3Next
from miles.backends.megatron_utils.hf.vocab import padded_vocab_size
from miles.utils.errors import UserError

FAMILIES: tuple[Family, ...] = (
    DeepseekV3(),
    DeepseekV32(),
    Glm4MoeLite(),
    Llama(),
    Qwen2(),
    Qwen3(),
    Qwen3Moe(),
    Glm4Moe(),
    Mistral(),
    Ministral(),
    Ministral3(),
    Glm4(),
    Gemma2(),
    Gemma3(),
    Qwen3Next(),
    Qwen3_5(),
    Qwen3_5Moe(),
    GptOss(),
    Llama4(),
    MiniMaxM2(),
)

__all__ = ["FAMILIES", "Entry", "Family", "family_for", "load_hf_config", "padded_vocab_size"]


def load_hf_config(folder: str | Path) -> PreTrainedConfig:
    """Read `folder`/config.json. Raises ValueError where there is none.

    Of a model that sees as well, it is the language model's configuration, with the whole model's architectures.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: give the local folder of a Hugging Face checkpoint")
    whole = AutoConfig.from_pretrained(folder)
    text = whole.get_text_config()
    if text is not whole:
        text.architectures, text.tie_word_embeddings = whole.architectures, whole.tie_word_embeddings
        quantization = whole.to_dict().get("quantization_config")
        if quantization is not None:
            text.quantization_config = quantization
    return text


def family_for(hf_config: PreTrainedConfig) -> Family:
    """The family of a checkpoint, by the first of its architectures, with its configuration checked.

    Raises ValueError for an unknown architecture and for a configuration that the family cannot express.
    """
    known = {name: family for family in FAMILIES for name in family.architectures}
    given = hf_config.architectures
    if not given or given[0] not in known:
        raise UserError(f"config.json has architectures={given}; supported: {', '.join(sorted(known))}")
    family = known[given[0]]
    family.check(hf_config)
    return family
