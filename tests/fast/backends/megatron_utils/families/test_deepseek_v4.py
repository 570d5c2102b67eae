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
    ignored = ("mtp.0.", "model.layers.3.", "mtp.1.", "model.layers.4.")
    assert family.ignored_prefixes(config_with(num_nextn_predict_layers=2)) == ignored
    assert family.ignored_prefixes(config_with(num_nextn_predict_layers=0)) == ()


def test_names_are_those_that_the_checkpoint_has():
    """The repackaging in FP8 has others, which SGLang makes of the published ones."""
    config = config_with()
    family = family_for(config)
    entries = family.entries(config, range(3), True, True)
    assert family.renamed(entries, {"embed.weight"}) == entries
    names = {
        old: new
        for entry, renamed in zip(entries, family.renamed(entries, {"model.embed_tokens.weight"}), strict=True)
        for old, new in zip(entry.hf_names, renamed.hf_names, strict=True)
    }
    assert len(set(names.values())) == len(names)
    expected = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "hc_head_fn": "model.hc_head_fn",
        "layers.0.hc_attn_scale": "model.layers.0.hc_attn_scale",
        "layers.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "layers.0.ffn.gate.tid2eid": "model.layers.0.mlp.topk.tid2eid",
        "layers.1.attn.indexer.compressor.ape": "model.layers.1.self_attn.indexer.compressor.ape",
        "layers.2.attn.compressor.wgate.weight": "model.layers.2.self_attn.compressor.wgate.weight",
        "layers.2.ffn.experts.7.w3.weight": "model.layers.2.mlp.experts.7.up_proj.weight",
    }
    assert {name: names[name] for name in expected} == expected


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
