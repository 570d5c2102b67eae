"""Gemma 2 and 3."""

from transformers import Gemma2Config, Gemma3TextConfig

from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

GEMMA = SIZES | dict(
    num_hidden_layers=2,
    head_dim=32,
    pad_token_id=None,
    query_pre_attn_scalar=24,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention"],
)
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"sliding_attention": LOCAL, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
CASES = {
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma2 untied": Gemma2Config(
        **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False
    ),
    "gemma3": Gemma3TextConfig(**GEMMA, rope_parameters=ROPES),
    "gemma3 untied": Gemma3TextConfig(**GEMMA, final_logit_softcapping=5.0, tie_word_embeddings=False),
}
CONTROLS = {
    "no cap of scores": ("gemma2", {"attn_logit_softcapping": None}),
    "no cap of logits": ("gemma2", {"final_logit_softcapping": None}),
    "another scale of scores": ("gemma2", {"query_pre_attn_scalar": 32}),
    "no window": ("gemma2", {"sliding_window": None}),
    "windows in the wrong layer": ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}),
    "no stretch of the full layers' rope": ("gemma3", {"rope_parameters": ROPES | {"full_attention": LOCAL}}),
    "another rope in layers with a window": (
        "gemma3",
        {"rope_parameters": ROPES | {"sliding_attention": LOCAL | {"rope_theta": 1e6}}},
    ),
    "no cap of logits in Gemma 3": ("gemma3 untied", {"final_logit_softcapping": None}),
}
REFUSED = [
    (Gemma2Config, "Gemma2ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
    (Gemma2Config, "Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    (Gemma2Config, "Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (Gemma3TextConfig, "Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (Gemma3TextConfig, "Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (
        Gemma3TextConfig,
        "Gemma3ForCausalLM",
        {"rope_parameters": ROPES | {"sliding_attention": LOCAL | {"rope_type": "dynamic", "factor": 2.0}}},
        "rope_parameters.sliding_attention.rope_type='dynamic'",
    ),
    (Gemma3TextConfig, "Gemma3nForCausalLM", {}, "architectures=.'Gemma3nForCausalLM'"),
]
FAMILY = FamilyTests(
    cases=CASES,
    slow_layouts=("pp2", "cp2"),
    controls=CONTROLS,
    refused=[
        (config_class(**GEMMA | changes, architectures=[architecture]), named)
        for config_class, architecture, changes, named in REFUSED
    ],
)
