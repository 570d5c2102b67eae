"""MiniMax-M2 against transformers; what it refuses."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import MiniMaxM2Config

from miles.backends.megatron_utils.families import family_for
from tests.fast.backends.megatron_utils.families import parity
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, measure, prepare

HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MINIMAX = SIZES | dict(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=24,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=8,
    num_experts_per_tok=3,
    rope_parameters=HALF,
)
CASES = {"untied": MiniMaxM2Config(**MINIMAX), "tied": MiniMaxM2Config(**MINIMAX, tie_word_embeddings=True)}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cases"), CASES)


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "ep2"])
def test_parity(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2", "tp2_sp_etp1", "tp2_sp_ep2"])
def test_parity_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_the_checkpoint_has_the_hubs_names(root):
    family = family_for(MiniMaxM2Config(**MINIMAX, architectures=["MiniMaxM2ForCausalLM"]))
    names = {name for entry in family.entries(CASES["untied"], range(2), True, True) for name in entry.hf_names}
    assert {
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.1.block_sparse_moe.e_score_correction_bias",
        *(f"model.layers.1.block_sparse_moe.experts.7.w{part}.weight" for part in (1, 2, 3)),
    } < names
    assert not [name for name in names if ".mlp." in name]


def test_controls(run_ranks, root):
    controls = {
        "all of each head rotated": (
            "tied",
            {"rope_parameters": HALF | {"partial_rotary_factor": 1.0}, "rotary_dim": 16},
        ),
        "another number of experts": ("tied", {"num_experts_per_tok": 4}),
    }
    check_controls(run_ranks, root, controls)


def test_norms_of_each_ranks_own_heads_are_not_the_models(run_ranks, root):
    def controlled(_file, *arguments):
        run_ranks(__file__, *arguments)

    assert measure(controlled, root, "tp2_sp", ["tied"])["tied"]["packed"] > 1e-3


def test_rotary_dim_of_the_hub_is_read():
    hub = dict(MINIMAX, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    config = MiniMaxM2Config(**hub, architectures=["MiniMaxM2ForCausalLM"])
    frequencies = family_for(config).ropes(config)["default"].inv_freq_R
    assert torch.equal(frequencies, 1e4 ** -(torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rotary_dim": None}, "partial_rotary_factor=0.5 rotates 8 of a head, rotary_dim 16"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
        ({"attn_type_list": [1, 0]}, r"attn_type_list has \[0\]"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        family_for(MiniMaxM2Config(**{**MINIMAX, **changes}, architectures=["MiniMaxM2ForCausalLM"]))


if __name__ == "__main__":
    from miles.backends.megatron_utils.parts import full_norm

    # The mean over this rank's heads in place of all heads.
    full_norm.reduce_from_tensor_model_parallel_region = lambda squares, group: squares * group.size()
    parity.main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]), sys.argv[5], json.loads(sys.argv[6]))
