"""What is special in DeepSeek-V3 and R1."""

import json

import pytest

from miles.backends.megatron_utils.families import family_for
from miles.hf.config import load_hf_config
from tests.fast.backends.megatron_utils.families.data.deepseek_v3 import CASES, config_with


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
