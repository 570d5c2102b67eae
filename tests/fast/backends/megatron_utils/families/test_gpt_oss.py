"""gpt-oss against transformers; what it refuses."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig

from miles.backends.megatron_utils.families import family_for, gpt_oss
from miles.backends.megatron_utils.parts import attention
from miles.hf.expert_layouts import FusedDown, FusedGateUp
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families import parity
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, measure, prepare

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
GPT_OSS = SIZES | dict(
    num_hidden_layers=2,
    intermediate_size=24,
    head_dim=16,
    num_local_experts=8,
    num_experts_per_tok=3,
    sliding_window=20,
    rope_parameters=YARN,
    pad_token_id=None,
)
CASES = {"untied": GptOssConfig(**GPT_OSS), "tied": GptOssConfig(**GPT_OSS, tie_word_embeddings=True)}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    # Wide enough that the experts' gates reach their limit.
    return prepare(tmp_path_factory.mktemp("cases"), CASES, std=0.25)


@pytest.mark.parametrize("layout", ["one", "tp2_sp_etp1", "ep2"])
def test_parity(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2", "tp2_sp_ep2"])
def test_parity_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    controls = {
        "no window": ("tied", {"sliding_window": 4096}),
        "windows in all layers": ("tied", {"layer_types": ["sliding_attention"] * 2}),
        "truncated yarn": ("tied", {"rope_parameters": YARN | {"truncate": True}}),
        "another number of experts": ("tied", {"num_experts_per_tok": 4}),
    }
    check_controls(run_ranks, root, controls)


def _without_sinks() -> None:
    attend = attention.attend

    def plain(query, key, value, packed, options, scale, sinks):
        return attend(query, key, value, packed, replace(options, sinks=False), scale, None)

    attention.attend = plain


def _with_fields(**fields) -> None:
    of_family = gpt_oss.GptOss.transformer_config
    gpt_oss.GptOss.transformer_config = lambda self, hf_config: of_family(self, hf_config) | fields


# What no field of config.json switches off.
CONTROLS = {
    "no sinks": _without_sinks,
    "no limit of the gate": lambda: _with_fields(activation_func_clamp_value=None),
    "nothing added to the up projection": lambda: _with_fields(glu_linear_offset=0.0),
    "softmax over all experts": lambda: _with_fields(moe_router_pre_softmax=True),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_of_what_is_always_on(run_ranks, root, control):
    def controlled(_file, *arguments):
        run_ranks(__file__, *arguments, control)

    assert measure(controlled, root, "one", ["tied"])["tied"]["packed"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": False}, "attention_bias=False"),
        ({"swiglu_limit": 10.0}, "swiglu_limit=10.0"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types=.'linear_attention'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 weights cannot be trained.*dequantize=True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        family_for(GptOssConfig(**{**GPT_OSS, **changes}, architectures=["GptOssForCausalLM"]))


def test_experts_are_not_split():
    config = GptOssConfig(**GPT_OSS, architectures=["GptOssForCausalLM"])
    with pytest.raises(ValueError, match="--expert-tensor-parallel-size 2 .* give 1"):
        family_for(config).check_layout(config, ParallelSizes(tp=2, etp=2, sequence_parallel=True))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "shape", "shard"),
    [
        (FusedGateUp(interleaved=True), (3, 5, 16), lambda n: (3, 16 // n, 5)),
        (FusedGateUp(interleaved=False), (3, 5, 16), lambda n: (3, 16 // n, 5)),
        (FusedGateUp(interleaved=True), (3, 16), lambda n: (3, 16 // n)),
        (FusedDown(), (3, 8, 5), lambda n: (3, 5, 8 // n)),
    ],
)
def test_fused_experts_keep_every_bit(kind, shape, shard, size):
    tensor = torch.randn(shape)
    shards = [kind.split([tensor], rank, size) for rank in range(size)]
    assert {tuple(part.shape) for part in shards} == {shard(size)}
    (merged,) = kind.merge(shards)
    assert torch.equal(merged, tensor)


def test_where_gate_and_up_are():
    fused = torch.tensor([[0.0, 10, 1, 11, 2, 12, 3, 13]])
    assert FusedGateUp(interleaved=True).split([fused], 1, 2).tolist() == [[2, 3, 12, 13]]
    fused = torch.tensor([[0.0, 1, 2, 3, 10, 11, 12, 13]])
    assert FusedGateUp(interleaved=False).split([fused], 1, 2).tolist() == [[2, 3, 12, 13]]


if __name__ == "__main__":
    CONTROLS[sys.argv[7]]()
    parity.main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]), sys.argv[5], json.loads(sys.argv[6]))
