"""Llama 4's language model."""

from unittest import mock

from transformers import Llama4TextConfig

from miles.backends.megatron_utils.families.llama4 import Llama4
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

# Llama 4 Scout's, for a shorter text.
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 128,
}
LLAMA4 = SIZES | dict(
    num_hidden_layers=2,
    intermediate_size=24,
    intermediate_size_mlp=48,
    head_dim=16,
    num_local_experts=4,
    attention_chunk_size=30,
    floor_scale=20,
    no_rope_layers=[1, 0],
    rope_parameters=ROPE,
    pad_token_id=None,
)
CASES = {
    "experts": Llama4TextConfig(**LLAMA4),
    # As Maverick: experts in every second layer, no norms of queries and keys.
    "tied": Llama4TextConfig(
        **LLAMA4,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        tie_word_embeddings=True,
    ),
}
CONTROLS = {
    "no chunks": ("experts", {"attention_chunk_size": None}),
    "chunks in all layers": ("experts", {"layer_types": ["chunked_attention"] * 2}),
    "no temperature": ("experts", {"attn_temperature_tuning": False}),
    "another temperature": ("experts", {"attn_scale": 0.2}),
    "no norms of queries and keys": ("experts", {"use_qk_norm": False}),
    "positions in all layers": ("tied", {"no_rope_layers": [1, 1]}),
    "another rope": ("tied", {"rope_parameters": ROPE | {"high_freq_factor": 4.0}}),
}
REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.'sliding_attention'"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quant_method='compressed-tensors'"),
]


def config(**changes) -> Llama4TextConfig:
    return Llama4TextConfig(**LLAMA4 | changes, architectures=["Llama4ForCausalLM"])


def with_fields(**fields):
    of_family = Llama4.transformer_config
    return mock.patch.object(Llama4, "transformer_config", lambda self, hf_config: of_family(self, hf_config) | fields)


FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=("pp2", "cp2", "tp2_sp_etp1", "tp2_sp_ep2"),
    controls=CONTROLS,
    switches={
        "scores on the experts' outputs": ("experts", "one", lambda: with_fields(moe_apply_probs_on_input=False)),
        "a softmax over experts": (
            "experts",
            "one",
            lambda: with_fields(moe_router_score_function="softmax", moe_router_pre_softmax=True),
        ),
    },
    refused=[(config(**changes), named) for changes, named in REFUSED],
    layouts_refused=[
        (config(), ParallelSizes(tp=2, ep=3), "--expert-model-parallel-size 3 .*--sequence-parallel"),
    ],
)
