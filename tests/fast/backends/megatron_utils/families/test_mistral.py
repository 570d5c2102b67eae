"""Mistral, Ministral and Ministral 3 against transformers; what they refuse."""

import pytest
from transformers import Ministral3Config, MinistralConfig, MistralConfig

from miles.backends.megatron_utils.families import family_for
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, prepare

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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("cases"), CASES)


@pytest.mark.parametrize("layout", ["one", "tp2_sp"])
def test_parity(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_parity_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    controls = {
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
    check_controls(run_ranks, root, controls)


@pytest.mark.parametrize(
    ("config_class", "changes", "named"),
    [
        (MistralConfig, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        (MistralConfig, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (MistralConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        (MinistralConfig, {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            Ministral3Config,
            {"rope_parameters": {name: value for name, value in ROPE.items() if name != "llama_4_scaling_beta"}},
            "rope_parameters.llama_4_scaling_beta=None",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config_class, changes, named):
    hf_config = config_class(**{**MISTRAL, "rope_parameters": ROPE, **changes})
    hf_config.architectures = [config_class.__name__.replace("Config", "ForCausalLM")]
    with pytest.raises(ValueError, match=named):
        family_for(hf_config)
