"""DeepSeek-V4 as published: its sizes, and what is told apart by configurations."""

import json
import math

import pytest

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.same_computation import check_same_computation
from miles.hf.config import load_hf_config
from miles.hf.families.deepseek_v4 import HEAVY, SPARSE, WINDOW
from tests.fast.backends.megatron_utils.families.data.deepseek_v4 import config_with
from tests.fast.published_deepseek_v4 import FLASH, PRO


@pytest.mark.parametrize(
    "fields, kinds, tensors, total, active",
    [(FLASH, (2, 21, 20), 34223, 284.3, 13.3), (PRO, (0, 30, 31), 71983, 1573.0, 48.9)],
    ids=["flash", "pro"],
)
def test_published_sizes(tmp_path, fields, kinds, tensors, total, active):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    hf_config = load_hf_config(tmp_path)
    family = family_for(hf_config)
    assert tuple(hf_config.layer_types.count(kind) for kind in (WINDOW, SPARSE, HEAVY)) == kinds
    counts = {
        name: math.prod(shape)
        for entry in family.entries(hf_config, range(hf_config.num_hidden_layers), True, True)
        for name, shape in zip(entry.hf_names, entry.shapes, strict=True)
    }
    share = hf_config.num_experts_per_tok / hf_config.n_routed_experts
    used = sum(count * share if ".experts." in name else count for name, count in counts.items())
    used -= counts["embed.weight"]
    assert (len(counts), round(sum(counts.values()) / 1e9, 1), round(used / 1e9, 1)) == (tensors, total, active)


def test_next_token_layers_are_those_that_config_json_names():
    family = family_for(config_with())
    assert family.ignored_prefixes(config_with(num_nextn_predict_layers=2)) == ("mtp.0.", "mtp.1.")
    assert family.ignored_prefixes(config_with(num_nextn_predict_layers=0)) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [WINDOW, HEAVY, HEAVY]},
        {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
        {"index_topk": 3},
        {"sliding_window": 9},
        {"hc_sinkhorn_iters": 5},
    ],
)
def test_weights_of_another_computation_are_refused(changes):
    with pytest.raises(ValueError, match="computes otherwise"):
        check_same_computation("--ref-load", "other", config_with(), config_with(**changes))
