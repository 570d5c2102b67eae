"""Model families: how Hugging Face configurations, names and layouts map to Megatron's and back, one file a family."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.families.deepseek_v3 import DeepseekV3
from miles.backends.megatron_utils.families.deepseek_v4 import DeepseekV4
from miles.backends.megatron_utils.families.deepseek_v32 import DeepseekV32
from miles.backends.megatron_utils.families.gemma2 import Gemma2
from miles.backends.megatron_utils.families.gemma3 import Gemma3
from miles.backends.megatron_utils.families.glm4 import Glm4
from miles.backends.megatron_utils.families.glm4_moe import Glm4Moe
from miles.backends.megatron_utils.families.glm4_moe_lite import Glm4MoeLite
from miles.backends.megatron_utils.families.gpt_oss import GptOss
from miles.backends.megatron_utils.families.llama import Llama
from miles.backends.megatron_utils.families.llama4 import Llama4
from miles.backends.megatron_utils.families.minimax_m2 import MiniMaxM2
from miles.backends.megatron_utils.families.mistral import Ministral, Ministral3, Mistral
from miles.backends.megatron_utils.families.qwen2 import Qwen2
from miles.backends.megatron_utils.families.qwen3 import Qwen3
from miles.backends.megatron_utils.families.qwen3_5 import Qwen3_5, Qwen3_5Moe
from miles.backends.megatron_utils.families.qwen3_moe import Qwen3Moe
from miles.backends.megatron_utils.families.qwen3_next import Qwen3Next
from miles.utils.errors import UserError

FAMILIES: tuple[Family, ...] = (
    DeepseekV3(),
    DeepseekV32(),
    DeepseekV4(),
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

__all__ = ["FAMILIES", "Family", "family_for"]


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
