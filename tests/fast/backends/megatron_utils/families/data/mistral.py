"""Mistral, Ministral and Ministral 3."""

from transformers import Ministral3Config, MinistralConfig, MistralConfig

from tests.fast.backends.megatron_utils.families.record import SIZES, FamilyTests

MISTRAL = SIZES | dict(num_hidden_layers=2, pad_token_id=None)
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = MISTRAL | dict(head_dim=32, max_position_embeddings=256)
CASES = {
    "mistral": MistralConfig(**MISTRAL, sliding_window=24),
    "mistral tied": MistralConfig(**MISTRAL, sliding_window=None, tie_word_embeddings=True),
    "ministral": MinistralConfig(
        **MISTRAL, head_dim=32, sliding_window=24, layer_types=["sliding_attention", "full_attention"]
    ),
    "ministral3": Ministral3Config(**MINISTRAL3, rope_parameters=ROPE),
    "ministral3 tied": Ministral3Config(
        **MINISTRAL3,
        rope_parameters=ROPE | {"mscale_all_dim": 1.0},
        sliding_window=24,
        tie_word_embeddings=True,
    ),
}
CONTROLS = {
    "no window": ("mistral", {"sliding_window": None}),
    "a window of one more": ("mistral", {"sliding_window": 25}),
    "windows in the wrong layer": ("ministral", {"layer_types": ["full_attention", "sliding_attention"]}),
    "no window in Ministral 3": ("ministral3 tied", {"sliding_window": None}),
    "no stretch": ("ministral3", {"rope_parameters": ROPE | {"rope_type": "default"}}),
    "no scale of angles": ("ministral3", {"rope_parameters": ROPE | {"mscale_all_dim": 1.0}}),
    "no temperature": ("ministral3", {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.0}}),
    "temperature from another position on": (
        "ministral3",
        {"rope_parameters": ROPE | {"original_max_position_embeddings": 33}},
    ),
}
REFUSED = [
    (MistralConfig, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    (MistralConfig, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (MistralConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    (MinistralConfig, {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    (
        Ministral3Config,
        {"rope_parameters": {name: value for name, value in ROPE.items() if name != "llama_4_scaling_beta"}},
        "rope_parameters.llama_4_scaling_beta=None",
    ),
]
FAMILY = FamilyTests(
    cases=CASES,
    slow_layouts=("pp2", "cp2"),
    controls=CONTROLS,
    refused=[
        (
            config_class(
                **MISTRAL | {"rope_parameters": ROPE} | changes,
                architectures=[config_class.__name__.replace("Config", "ForCausalLM")],
            ),
            named,
        )
        for config_class, changes, named in REFUSED
    ],
)
