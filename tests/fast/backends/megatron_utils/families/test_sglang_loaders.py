"""SGLang's own loaders take every name that is sent, and need no other: each family's class, built and loaded on a CPU.

Several of them drop a name that they don't know without a word, so the models are filled with NaN before.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from miles.backends.megatron_utils.families import FAMILIES, family_for
from miles.hf.config import load_hf_config
from miles.hf.deepseek_v4_hub import hub_config
from miles.hf.families.deepseek_v4 import repackaged_name

pytestmark = pytest.mark.real

# A folder beside the architectures'.
REPACKAGED = "DeepSeek-V4, repackaged"
HELPER = Path(__file__).parent / "sglang_loaders.py"
SIZES = dict(
    vocab_size=64,  # What SGLang pads vocabularies to.
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    head_dim=16,
    tie_word_embeddings=False,
)
LATENT = {name: value for name, value in SIZES.items() if name != "head_dim"} | dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    # SGLang's rope of latent attention on a CPU knows yarn only.
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED = dict(EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
# Here and below: what the hub's config.json says as well, which SGLang reads and transformers does not.
DEEPSEEK = dict(
    LATENT, **ROUTED, n_group=1, topk_group=1, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid"
)
NETS = dict(
    layer_types=["linear_attention", "full_attention"],
    full_attention_interval=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
VISION = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2)
LLAMA4_TEXT = hf.Llama4TextConfig(**SIZES, intermediate_size_mlp=64, num_local_experts=4, interleave_moe_layer_step=2)
CONFIGS = {
    "LlamaForCausalLM": hf.LlamaConfig(**SIZES),
    "MistralForCausalLM": hf.MistralConfig(**SIZES),
    "Ministral3ForCausalLM": hf.Ministral3Config(**SIZES),
    "Qwen2ForCausalLM": hf.Qwen2Config(**{name: value for name, value in SIZES.items() if name != "head_dim"}),
    "Qwen3ForCausalLM": hf.Qwen3Config(**SIZES),
    "Qwen3MoeForCausalLM": hf.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "Qwen3NextForCausalLM": hf.Qwen3NextConfig(
        **SIZES, **EXPERTS, **NETS, num_experts=4, shared_expert_intermediate_size=32
    ),
    "Qwen3_5ForConditionalGeneration": hf.Qwen3_5Config(
        text_config=hf.Qwen3_5TextConfig(**SIZES, **NETS).to_dict(),
        vision_config=dict(VISION, depth=1, num_heads=2, out_hidden_size=64),
    ),
    "Qwen3_5MoeForConditionalGeneration": hf.Qwen3_5MoeConfig(
        text_config=hf.Qwen3_5MoeTextConfig(
            **{name: value for name, value in SIZES.items() if name != "intermediate_size"},
            **EXPERTS,
            **NETS,
            num_experts=4,
            shared_expert_intermediate_size=32,
        ).to_dict(),
        vision_config=dict(VISION, depth=1, num_heads=2, out_hidden_size=64),
    ),
    "Glm4ForCausalLM": hf.Glm4Config(**SIZES, attention_bias=True),
    "Glm4MoeForCausalLM": hf.Glm4MoeConfig(**SIZES, **ROUTED, attention_bias=True, use_qk_norm=True),
    "Glm4MoeLiteForCausalLM": hf.Glm4MoeLiteConfig(**DEEPSEEK),
    "DeepseekV3ForCausalLM": hf.DeepseekV3Config(**DEEPSEEK),
    "DeepseekV32ForCausalLM": hf.DeepseekV32Config(
        **DEEPSEEK, num_experts=4, index_n_heads=4, index_head_dim=16, index_topk=16
    ),
    # SGLang's sizes of heads, ratios and indexer are fixed.
    "DeepseekV4ForCausalLM": hf.DeepseekV4Config(
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings")},
        **EXPERTS,
        num_hidden_layers=3,
        num_attention_heads=8,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=16,
        compress_ratios=[0, 4, 128],
        num_hash_layers=2,
        num_nextn_predict_layers=0,
        n_routed_experts=4,
        rope_parameters=LATENT["rope_parameters"],
    ),
    "Gemma2ForCausalLM": hf.Gemma2Config(**{**SIZES, "tie_word_embeddings": True}, hidden_act="gelu_pytorch_tanh"),
    "Gemma3ForCausalLM": hf.Gemma3TextConfig(
        **{**SIZES, "tie_word_embeddings": True}, layer_types=["sliding_attention", "full_attention"]
    ),
    "GptOssForCausalLM": hf.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=7.0),
    "MiniMaxM2ForCausalLM": hf.MiniMaxM2Config(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        rotary_dim=8,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        use_routing_bias=True,
        scoring_func="sigmoid",
    ),
    "Llama4ForConditionalGeneration": hf.Llama4Config(
        text_config=LLAMA4_TEXT.to_dict(),
        vision_config=VISION
        | dict(
            num_hidden_layers=1,
            image_size=28,
            vision_output_dim=32,
            projector_input_dim=32,
            projector_output_dim=32,
        ),
    ),
}
# What SGLang 0.5.15 cannot serve, so that there is no loader to try.
NOT_SERVED = {
    "MinistralForCausalLM": "SGLang has no class of that name",
    "Llama4ForCausalLM": "SGLang's class has Llama's loader, which knows no experts; the whole model's class does",
    "Qwen3_5ForCausalLM": "SGLang registers the whole model's class only",
    "Qwen3_5MoeForCausalLM": "SGLang registers the whole model's class only",
}
# Parameters that hold nothing of the language model: beginnings of their names, and why.
NO_WEIGHTS = {
    "Qwen3_5ForConditionalGeneration": {"visual.": "sees; it is not trained"},
    "Qwen3_5MoeForConditionalGeneration": {"visual.": "sees; it is not trained"},
}


def weights_of(hf_config) -> dict[str, torch.Tensor]:
    """Random values under every name that a gather gives."""
    torch.manual_seed(0)
    entries = family_for(hf_config).entries(hf_config, range(hf_config.num_hidden_layers), True, True)
    return {
        name: torch.zeros(shape, dtype=torch.int64) if name.endswith("tid2eid") else torch.randn(shape)
        for entry in entries
        if not entry.load_only
        for name, shape in zip(entry.hf_names, entry.shapes, strict=True)
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{architecture: what the helper says}."""
    root = tmp_path_factory.mktemp("models")
    for architecture, hf_config in CONFIGS.items():
        hf_config.architectures = [architecture]
        hf_config.save_pretrained(root / architecture)
        if architecture == "DeepseekV4ForCausalLM":
            (root / architecture / "config.json").write_text(json.dumps(hub_config(hf_config)))
        save_file(weights_of(load_hf_config(root / architecture)), root / architecture / "weights.safetensors")
        if architecture == "DeepseekV4ForCausalLM":
            repackaged = root / REPACKAGED
            shutil.copytree(root / architecture, repackaged)
            weights = load_file(repackaged / "weights.safetensors")
            save_file(
                {repackaged_name(name): tensor for name, tensor in weights.items()},
                repackaged / "weights.safetensors",
            )
    result = root / "result.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ended = subprocess.run(
        [sys.executable, str(HELPER), str(root), str(result)],
        # The last two: DeepSeek-V4's in FP8, and kernels that it compiles.
        env=environment
        | {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_OPT_FP8_WO_A_GEMM": "0", "SGLANG_DSV4_MHC_PREWARM": "0"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(result.read_text())


def test_every_architecture_is_tried():
    named = {architecture for family in FAMILIES for architecture in family.architectures}
    assert named == CONFIGS.keys() | NOT_SERVED.keys()
    assert not CONFIGS.keys() & NOT_SERVED.keys()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_parameter_receives_values(found, architecture):
    allowed = tuple(NO_WEIGHTS.get(architecture, {}))
    assert found[architecture]["parameters"] > 10
    assert [name for name in found[architecture]["empty"] if not name.startswith(allowed)] == []


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_name_is_taken(found, architecture):
    assert found[architecture]["unused"] == []


def test_deepseek_v4_has_two_sets_of_names(found):
    assert found[REPACKAGED] == found["DeepseekV4ForCausalLM"]
