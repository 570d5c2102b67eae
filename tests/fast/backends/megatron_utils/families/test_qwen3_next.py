"""Qwen3-Next and Qwen3.5 (text) against transformers; what they refuse."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from miles.backends.megatron_utils.families import family_for
from miles.hf.config import load_hf_config
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, prepare

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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = prepare(tmp_path_factory.mktemp("cases"), CASES)
    for name, hf_config in WHOLE.items():
        folder = shutil.copytree(root / name, root / f"{name} whole")
        hf_config.architectures = [type(hf_config).__name__.replace("Config", "ForConditionalGeneration")]
        hf_config.save_pretrained(folder / "checkpoint")
        for path in folder.glob("*/model.safetensors"):
            save_file(within_whole(load_file(path)), path, metadata={"format": "pt"})
    return root


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


@pytest.mark.parametrize("layout", ["one", "tp2_sp"])
def test_parity(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_parity_of_experts(run_ranks, root):
    check_parity(run_ranks, root, "ep2", cases=WITH_EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_sp_ep2", "tp2_sp_etp1"])
def test_parity_of_experts_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout, cases=WITH_EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_parity_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    controls = {
        "all of each head rotated": ("qwen3_5", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
        "scores that add up to one": ("qwen3_next dense first", {"norm_topk_prob": True}),
        "another number of experts a token": ("qwen3_5_moe", {"num_experts_per_tok": 3}),
    }
    check_controls(run_ranks, root, controls)


def config_of(config_class, **changes):
    name = config_class.__name__.removesuffix("Config").removesuffix("Text")
    return config_class(**{**NETS, **EXPERTS, **changes}, architectures=[f"{name}ForCausalLM"])


@pytest.mark.parametrize(
    ("config_class", "changes", "named"),
    [
        (Qwen3NextConfig, {"attention_bias": True}, "attention_bias=True"),
        (Qwen3NextConfig, {"num_experts_per_tok": 1}, "norm_topk_prob=True with num_experts_per_tok=1"),
        (Qwen3_5MoeTextConfig, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        (Qwen3_5TextConfig, {"linear_num_value_heads": 3}, "linear_num_value_heads=3"),
        (Qwen3_5TextConfig, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config_class, changes, named):
    with pytest.raises(ValueError, match=named):
        family_for(config_of(config_class, **changes))


def test_what_the_whole_model_says_counts(tmp_path):
    whole = Qwen3_5Config(text_config=CASES["qwen3_5"].to_dict(), tie_word_embeddings=True)
    whole.architectures, whole.quantization_config = ["Qwen3_5ForConditionalGeneration"], {"quant_method": "fp8"}
    whole.save_pretrained(tmp_path)
    hf_config = load_hf_config(tmp_path)
    assert hf_config.tie_word_embeddings and hf_config.num_hidden_layers == 2
    with pytest.raises(ValueError, match="Qwen3_5ForConditionalGeneration is not supported: quantization_config="):
        family_for(hf_config)


@pytest.mark.parametrize("config_class", [Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig])
@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (ParallelSizes(tp=2), "needs --sequence-parallel"),
        (ParallelSizes(tp=2, cp=2, sequence_parallel=True), "does not divide the model's linear_num_key_heads 2"),
        (ParallelSizes(ep=3), "--expert-model-parallel-size 3"),
    ],
)
def test_layouts_that_are_refused(config_class, sizes, named):
    hf_config = config_of(config_class)
    family = family_for(hf_config)
    family.check_layout(hf_config, ParallelSizes(tp=2, sequence_parallel=True))
    with pytest.raises(ValueError, match=named):
        family.check_layout(hf_config, sizes)


def test_a_gpu_without_kernels_is_refused(monkeypatch):
    hf_config = config_of(Qwen3NextConfig)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("miles.backends.megatron_utils.parts.gated_delta_net.KERNELS_INSTALLED", False)
    with pytest.raises(ValueError, match="pip install flash-linear-attention"):
        family_for(hf_config).check_layout(hf_config, ParallelSizes())


def test_a_hopper_gpu_with_kernels_that_are_wrong_there_is_refused(monkeypatch):
    hf_config = config_of(Qwen3NextConfig)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("miles.backends.megatron_utils.parts.gated_delta_net.KERNELS_INSTALLED", True)
    for version, fits in {"3.3.1": True, "3.6.0": False, "3.7.1": True}.items():
        monkeypatch.setattr("triton.__version__", version)
        if fits:
            family_for(hf_config).check_layout(hf_config, ParallelSizes())
        else:
            with pytest.raises(ValueError, match="pip install tilelang"):
                family_for(hf_config).check_layout(hf_config, ParallelSizes())
