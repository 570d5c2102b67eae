"""MiniMax-M2."""

from unittest import mock

from transformers import MiniMaxM2Config

from miles.backends.megatron_utils.parts import full_norm
from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

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
CONTROLS = {
    "all of each head rotated": (
        "tied",
        {"rope_parameters": HALF | {"partial_rotary_factor": 1.0}, "rotary_dim": 16},
    ),
    "another number of experts": ("tied", {"num_experts_per_tok": 4}),
}
REFUSED = [
    ({"rotary_dim": None}, "partial_rotary_factor=0.5 rotates 8 of a head, rotary_dim 16"),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ({"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
    ({"attn_type_list": [1, 0]}, r"attn_type_list has \[0\]"),
    ({"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8' without weight_block_size"),
]


def norms_of_each_ranks_own_heads():
    """The mean over this rank's heads in place of all heads."""
    name = "reduce_from_tensor_model_parallel_region"
    return mock.patch.object(full_norm, name, lambda squares, group: squares * group.size())


FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=("pp2", "cp2", "tp2_sp_etp1", "tp2_sp_ep2"),
    controls=CONTROLS,
    switches={"norms of each rank's own heads": ("tied", "tp2_sp", norms_of_each_ranks_own_heads)},
    refused=[
        (MiniMaxM2Config(**MINIMAX | changes, architectures=["MiniMaxM2ForCausalLM"]), named)
        for changes, named in REFUSED
    ],
)
