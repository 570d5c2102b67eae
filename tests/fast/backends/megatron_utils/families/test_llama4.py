"""Llama 4's language model against transformers; what it refuses."""

import json
import sys
from pathlib import Path

import pytest
from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4TextConfig

from miles.backends.megatron_utils.families import family_for, llama4
from miles.backends.megatron_utils.hf_weights import check_names_and_shapes
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families import parity
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, measure, prepare

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


def test_controls(run_ranks, root):
    controls = {
        "no chunks": ("experts", {"attention_chunk_size": None}),
        "chunks in all layers": ("experts", {"layer_types": ["chunked_attention"] * 2}),
        "no temperature": ("experts", {"attn_temperature_tuning": False}),
        "another temperature": ("experts", {"attn_scale": 0.2}),
        "no norms of queries and keys": ("experts", {"use_qk_norm": False}),
        "positions in all layers": ("tied", {"no_rope_layers": [1, 1]}),
        "another rope": ("tied", {"rope_parameters": ROPE | {"high_freq_factor": 4.0}}),
    }
    check_controls(run_ranks, root, controls)


def _with_fields(**fields) -> None:
    of_family = llama4.Llama4.transformer_config
    llama4.Llama4.transformer_config = lambda self, hf_config: of_family(self, hf_config) | fields


# What no field of config.json switches off.
CONTROLS = {
    "scores on the experts' outputs": lambda: _with_fields(moe_apply_probs_on_input=False),
    "a softmax over experts": lambda: _with_fields(moe_router_score_function="softmax", moe_router_pre_softmax=True),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_of_what_is_always_on(run_ranks, root, control):
    def controlled(_file, *arguments):
        run_ranks(__file__, *arguments, control)

    assert measure(controlled, root, "one", ["experts"])["experts"]["packed"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.'sliding_attention'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config="),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        family_for(Llama4TextConfig(**{**LLAMA4, **changes}, architectures=["Llama4ForCausalLM"]))


def test_the_whole_models_checkpoint_without_what_sees(tmp_path):
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    whole = Llama4Config(
        text_config=CASES["experts"].to_dict(),
        vision_config=vision | dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32),
    )
    Llama4ForConditionalGeneration(whole).save_pretrained(tmp_path)
    hf_config = load_hf_config(tmp_path)
    family, index = family_for(hf_config), CheckpointIndex(tmp_path)
    entries = family.entries(hf_config, range(2), True, True)
    check_names_and_shapes(index, entries, family, hf_config)
    assert {name.split(".")[0] for name in index.files} == {"language_model", "vision_model", "multi_modal_projector"}
    ours = {name for entry in entries for name in entry.hf_names}
    assert ours == {name for name in index.files if name.startswith("language_model.")}


def test_layouts_that_are_refused():
    config = Llama4TextConfig(**LLAMA4, architectures=["Llama4ForCausalLM"])
    with pytest.raises(ValueError, match="--expert-model-parallel-size 3 .*--sequence-parallel"):
        family_for(config).check_layout(config, ParallelSizes(tp=2, ep=3))


if __name__ == "__main__":
    CONTROLS[sys.argv[7]]()
    parity.main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]), sys.argv[5], json.loads(sys.argv[6]))
