"""gpt-oss."""

from dataclasses import replace
from unittest import mock

from transformers import GptOssConfig

from miles.backends.megatron_utils.families.gpt_oss import GptOss
from miles.backends.megatron_utils.parts import attention
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

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
CONTROLS = {
    "no window": ("tied", {"sliding_window": 4096}),
    "windows in all layers": ("tied", {"layer_types": ["sliding_attention"] * 2}),
    "truncated yarn": ("tied", {"rope_parameters": YARN | {"truncate": True}}),
    "another number of experts": ("tied", {"num_experts_per_tok": 4}),
}
REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"attention_bias": False}, "attention_bias=False"),
    ({"swiglu_limit": 10.0}, "swiglu_limit=10.0"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types=.'linear_attention'"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method='bitsandbytes'"),
]


def config(**changes) -> GptOssConfig:
    return GptOssConfig(**GPT_OSS | changes, architectures=["GptOssForCausalLM"])


def without_sinks():
    attend = attention.attend

    def plain(query, key, value, packed, options, scale, sinks):
        return attend(query, key, value, packed, replace(options, sinks=False), scale, None)

    return mock.patch.object(attention, "attend", plain)


def with_fields(**fields):
    of_family = GptOss.transformer_config
    return mock.patch.object(GptOss, "transformer_config", lambda self, hf_config: of_family(self, hf_config) | fields)


FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp_etp1", "ep2"),
    slow_layouts=("pp2", "cp2", "tp2_sp_ep2"),
    controls=CONTROLS,
    switches={
        "no sinks": ("tied", "one", without_sinks),
        "no limit of the gate": ("tied", "one", lambda: with_fields(activation_func_clamp_value=None)),
        "nothing added to the up projection": ("tied", "one", lambda: with_fields(glu_linear_offset=0.0)),
        "softmax over all experts": ("tied", "one", lambda: with_fields(moe_router_pre_softmax=True)),
    },
    refused=[(config(**changes), named) for changes, named in REFUSED],
    layouts_refused=[
        (config(), ParallelSizes(tp=2, etp=2, sequence_parallel=True), "--expert-tensor-parallel-size 2 .* give 1")
    ],
    # Wide enough that the experts' gates reach their limit.
    std=0.25,
)
