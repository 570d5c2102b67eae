"""GLM-4 against transformers; what it refuses."""

import pytest
from transformers import Glm4Config

from miles.backends.megatron_utils.families import family_for
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, prepare

GLM4 = SIZES | dict(num_hidden_layers=2, head_dim=32, pad_token_id=None)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CASES = {
    "bias": Glm4Config(**GLM4, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}),
    "tied": Glm4Config(**GLM4, attention_bias=False, rms_norm_eps=1e-5, tie_word_embeddings=True),
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
        "all of each head rotated": ("bias", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
        "another rope": ("bias", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "rope_theta": 1e5}}),
        "another epsilon": ("tied", {"rms_norm_eps": 1e-2}),
    }
    check_controls(run_ranks, root, controls)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ({"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        family_for(Glm4Config(**{**GLM4, **changes}, architectures=["Glm4ForCausalLM"]))
