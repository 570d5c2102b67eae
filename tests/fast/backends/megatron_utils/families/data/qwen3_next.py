"""Qwen3-Next and Qwen3.5, the latter alone and as a part of models that see."""

import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
NETS = SIZES | dict(
    num_hidden_layers=2,
    head_dim=32,
    rope_parameters=ROPE,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40)
CASES = {
    "qwen3_next": Qwen3NextConfig(**NETS, **EXPERTS),
    "qwen3_next dense first": Qwen3NextConfig(
        **NETS, **EXPERTS, mlp_only_layers=[0], norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3_5": Qwen3_5TextConfig(**NETS),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **{name: value for name, value in NETS.items() if name != "intermediate_size"},
        **EXPERTS,
        tie_word_embeddings=True,
    ),
}
# The same as parts of models that see.
WHOLE = {
    "qwen3_5": Qwen3_5Config(text_config=CASES["qwen3_5"].to_dict()),
    "qwen3_5_moe": Qwen3_5MoeConfig(text_config=CASES["qwen3_5_moe"].to_dict(), tie_word_embeddings=True),
}
WITH_EXPERTS = [*(name for name in CASES if name != "qwen3_5"), "qwen3_5_moe whole"]
CONTROLS = {
    "all of each head rotated": ("qwen3_5", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
    "scores that add up to one": ("qwen3_next dense first", {"norm_topk_prob": True}),
    "another number of experts a token": ("qwen3_5_moe", {"num_experts_per_tok": 3}),
}
REFUSED = [
    (Qwen3NextConfig, {"attention_bias": True}, "attention_bias=True"),
    (Qwen3NextConfig, {"num_experts_per_tok": 1}, "norm_topk_prob=True with num_experts_per_tok=1"),
    (Qwen3_5MoeTextConfig, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    (Qwen3_5TextConfig, {"linear_num_value_heads": 3}, "linear_num_value_heads=3"),
    (Qwen3_5TextConfig, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
]
LAYOUTS_REFUSED = [
    (ParallelSizes(tp=2), "needs --sequence-parallel"),
    (ParallelSizes(tp=2, cp=2, sequence_parallel=True), "does not divide the model's linear_num_key_heads 2"),
    (ParallelSizes(ep=3), "--expert-model-parallel-size 3"),
]


def config_of(config_class, **changes):
    name = config_class.__name__.removesuffix("Config").removesuffix("Text")
    return config_class(**NETS | EXPERTS | changes, architectures=[f"{name}ForCausalLM"])


def add_whole_models(root):
    for name, hf_config in WHOLE.items():
        folder = shutil.copytree(root / name, root / f"{name} whole")
        hf_config.architectures = [type(hf_config).__name__.replace("Config", "ForConditionalGeneration")]
        hf_config.save_pretrained(folder / "checkpoint")
        for path in folder.glob("*/model.safetensors"):
            save_file(within_whole(load_file(path)), path, metadata={"format": "pt"})


def within_whole(tensors):
    """The language model's tensors as the whole model's checkpoint has them: experts of a layer in one tensor."""
    found = {
        "model.visual.pos_embed.weight": torch.ones(2, 2),
        "mtp.fc.weight": torch.ones(2, 2),
        **{name: tensor for name, tensor in tensors.items() if ".experts." not in name},
    }
    for prefix in {name.partition(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}:
        experts = range(EXPERTS["num_experts"])
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in experts])
            for part in ("gate", "up", "down")
        )
        found |= {prefix + "gate_up_proj": torch.cat((gate, up), dim=1), prefix + "down_proj": down}
    outside = ("model.visual.", "mtp.", "lm_head.")
    return {
        name if name.startswith(outside) else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in found.items()
    }


FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=("pp2", "cp2", "tp2_sp_ep2", "tp2_sp_etp1"),
    only={layout: WITH_EXPERTS for layout in ("ep2", "tp2_sp_ep2", "tp2_sp_etp1")},
    controls=CONTROLS,
    refused=[(config_of(config_class, **changes), named) for config_class, changes, named in REFUSED],
    layouts_accepted=[
        (config_of(config_class), ParallelSizes(tp=2, sequence_parallel=True))
        for config_class in (Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig)
    ],
    layouts_refused=[
        (config_of(config_class), sizes, named)
        for config_class in (Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig)
        for sizes, named in LAYOUTS_REFUSED
    ],
    finish=add_whole_models,
)
