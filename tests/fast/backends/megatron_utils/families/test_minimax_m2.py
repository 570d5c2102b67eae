"""MiniMax-M2's names and fields on the hub."""

import torch
from transformers import MiniMaxM2Config

from miles.backends.megatron_utils.families import family_for
from tests.fast.backends.megatron_utils.families.data.minimax_m2 import CASES, MINIMAX


def test_the_checkpoint_has_the_hubs_names():
    family = family_for(MiniMaxM2Config(**MINIMAX, architectures=["MiniMaxM2ForCausalLM"]))
    names = {name for entry in family.entries(CASES["untied"], range(2), True, True) for name in entry.hf_names}
    assert {
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.1.block_sparse_moe.e_score_correction_bias",
        *(f"model.layers.1.block_sparse_moe.experts.7.w{part}.weight" for part in (1, 2, 3)),
    } < names
    assert not [name for name in names if ".mlp." in name]


def test_rotary_dim_of_the_hub_is_read():
    hub = dict(MINIMAX, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    config = MiniMaxM2Config(**hub, architectures=["MiniMaxM2ForCausalLM"])
    frequencies = family_for(config).ropes(config)["default"].inv_freq_R
    assert torch.equal(frequencies, 1e4 ** -(torch.arange(0, 8, 2) / 8))
