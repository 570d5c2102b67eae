"""DeepSeek-V3 and R1 against transformers; what they refuse."""

import json

import pytest
from transformers import DeepseekV3Config

from miles.backends.megatron_utils.families import family_for
from miles.hf.config import load_hf_config
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.parity import SIZES, check_controls, check_parity, prepare

DEEPSEEK = SIZES | dict(
    num_hidden_layers=2,
    num_key_value_heads=4,
    first_k_dense_replace=1,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=48,
    routed_scaling_factor=2.5,
    # Far from that of the latents, which is fixed.
    rms_norm_eps=1e-2,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES = {
    "groups": DeepseekV3Config(**DEEPSEEK, tie_word_embeddings=False),
    # Queries without a latent, a stretched rope that does not rotate neighbours, no groups, two shared experts.
    "yarn": DeepseekV3Config(
        **DEEPSEEK | dict(q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2, rope_interleave=False),
        rope_parameters=YARN,
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
@pytest.mark.parametrize("layout", ["pp2", "cp2", "tp2_sp_ep2", "tp2_sp_etp1"])
def test_parity_in_further_layouts(run_ranks, root, layout):
    check_parity(run_ranks, root, layout)


def test_controls(run_ranks, root):
    controls = {
        "no groups": ("groups", {"n_group": 1, "topk_group": 1}),
        "another scale of the experts": ("groups", {"routed_scaling_factor": 1.0}),
        "another rotation": ("groups", {"rope_interleave": False}),
        "no stretch": ("yarn", {"rope_parameters": PLAIN_ROPE}),
        "no scale of angles": ("yarn", {"rope_parameters": YARN | {"mscale": 0.7}}),
        "no scale of scores": ("yarn", {"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}}),
    }
    check_controls(run_ranks, root, controls)


def config_with(**changes):
    config = DeepseekV3Config(**DEEPSEEK, architectures=["DeepseekV3ForCausalLM"])
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"n_shared_experts": 0}, "n_shared_experts=0"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"num_experts_per_tok": 2}, "n_group=4 with num_experts_per_tok=2 and topk_group=2"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": YARN | {"rope_type": "dynamic"}}, "rope_type='dynamic'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8': convert the weights to bf16"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        family_for(config_with(**changes))


def test_layouts():
    config = config_with()
    family = family_for(config)
    family.check_layout(config, ParallelSizes(tp=2, ep=4, cp=2, sequence_parallel=True))
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2 .* needs --sequence-parallel"):
        family.check_layout(config, ParallelSizes(tp=2))
    with pytest.raises(ValueError, match="-size 8 does not divide the model's num_attention_heads 4"):
        family.check_layout(config, ParallelSizes(tp=8, sequence_parallel=True))
    with pytest.raises(ValueError, match="--expert-model-parallel-size 3"):
        family.check_layout(config, ParallelSizes(ep=3))


def test_what_an_engine_fuses_arrives_together():
    keys = {}
    for entry in family_for(config_with()).entries(CASES["groups"], range(2), True, True):
        if entry.atomic is not None:
            keys.setdefault(entry.atomic, []).extend(entry.hf_names)
    assert list(keys.values()) == [
        [f"model.layers.{layer}.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        for layer in range(2)
    ]


def test_the_configuration_of_the_hub(tmp_path):
    """The fields of deepseek-ai/DeepSeek-V3 under their old names."""
    fields = config_with().to_dict() | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    }
    del fields["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_hf_config(tmp_path)
    family = family_for(config)
    assert family.ignored_prefixes(config) == ("model.layers.2.",)
    # (0.1 * ln 40 + 1) squared, over the root of 24.
    assert family.transformer_config(config)["softmax_scale"] == pytest.approx(1.87385421 / 24**0.5)
    assert family.ropes(config)["default"].scale == 1.0
