"""DeepSeek-V4."""

import dataclasses
from unittest import mock

import torch
from transformers import DeepseekV4Config

from miles.backends.megatron_utils.parts import (
    compressed_attention,
    hash_router,
    hyper_connections,
    shared_key_attention,
)
from miles.hf.deepseek_v4_hub import draw_experts, save_hub_weights
from miles.hf.families.deepseek_v4 import HEAVY, SPARSE, WINDOW
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.record import FamilyTests, changed

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TINY = dict(
    vocab_size=251,
    hidden_size=64,
    moe_intermediate_size=32,
    num_attention_heads=4,
    head_dim=32,
    partial_rotary_factor=0.25,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=16,
    sliding_window=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    # With few heads many scores are exactly zero, and which of them are picked is anyone's choice.
    index_n_heads=32,
    index_head_dim=16,
    index_topk=4,
    # Small, so that it clamps something here.
    swiglu_limit=0.5,
    max_position_embeddings=1024,
    rope_parameters=YARN,
)


def tiny(**changes) -> DeepseekV4Config:
    return DeepseekV4Config(**TINY | changes)


CASES = {
    "flash": tiny(
        num_hidden_layers=3,
        layer_types=[WINDOW, SPARSE, HEAVY],
        compress_rates={SPARSE: 4, HEAVY: 16},
        mlp_layer_types=["hash_moe", "hash_moe", "moe"],
    ),
    # So few picks that most queries gather them. Four layers, for stages that take turns.
    "pro": tiny(
        num_hidden_layers=4,
        layer_types=[HEAVY, SPARSE, HEAVY, SPARSE],
        compress_rates={SPARSE: 4, HEAVY: 32},
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
        index_topk=2,
    ),
}
CONTROLS = {
    "another window": ("flash", {"sliding_window": 7}),
    "fewer entries": ("flash", {"index_topk": 3}),
    "all entries": ("flash", {"index_topk": 512}),
    "no clamp": ("flash", {"swiglu_limit": 10.0}),
    "another scale of the experts": ("flash", {"routed_scaling_factor": 1.4}),
    "no stretch": ("flash", {"rope_parameters": dict.fromkeys(("main", "compress"), PLAIN_ROPE)}),
    "one round of making rows and columns one": ("flash", {"hc_sinkhorn_iters": 1}),
}


def replaced(module, name, make):
    """A patch that puts `make(original)` in the place of a function."""
    return lambda: mock.patch.object(module, name, make(getattr(module, name)))


def follows(change):
    """Pooling with `change` made to what says whether an entry follows another of its sequence."""

    def make(pool):
        def pooled(rows, gates, bias, windows, overlap):
            return pool(rows, gates, bias, dataclasses.replace(windows, follows_W=change(windows.follows_W)), overlap)

        return pooled

    return make


def without_sink(weights):
    return lambda query, key, mask, sink, scale: weights(query, key, mask, torch.full_like(sink, -1e4), scale)


def by_rows(write):
    return lambda output, streams, share, across: write(output, streams, share, across.mT)


def by_scores(routing):
    """Hash layers choose as the others do, without a bias."""
    return lambda *args, precomputed_indices, **kwargs: routing(*args, **kwargs)


SWITCHES = {
    "output not turned back": replaced(compressed_attention, "turned_back", lambda _: lambda out, *angles: out),
    "no overlap": replaced(compressed_attention, "pool", follows(torch.zeros_like)),
    "overlap across sequences": replaced(compressed_attention, "pool", follows(torch.ones_like)),
    "no sink": replaced(shared_key_attention, "_weights", without_sink),
    "streams mixed by rows": replaced(hyper_connections, "write", by_rows),
    "no table of experts": replaced(hash_router, "topk_routing_with_score_function", by_scores),
}
REFUSED = [
    ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method='greedy'"),
    ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    ({"n_shared_experts": 2}, "n_shared_experts=2"),
    ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"layer_types": [WINDOW, "full_attention", HEAVY]}, r"layer_types=\['full_attention'\]"),
    ({"mlp_layer_types": ["dense", "moe", "moe"]}, r"mlp_layer_types=\['dense'\]"),
    (
        {"rope_parameters": {"main": {"rope_type": "default"}, "compress": {"rope_type": "dynamic"}}},
        "rope_parameters.compress.rope_type='dynamic'",
    ),
]


def config_with(**changes) -> DeepseekV4Config:
    return changed(
        tiny(num_hidden_layers=3, layer_types=[WINDOW, SPARSE, HEAVY], architectures=["DeepseekV4ForCausalLM"]),
        **changes,
    )


def save(model, folder) -> None:
    """config.json is transformers', for ratios that are not published ones; it reads the hub's names of weights."""
    model.save_pretrained(folder)
    save_hub_weights(model, folder)


FAMILY = FamilyTests(
    cases=CASES,
    layouts=("one", "tp2_sp", "ep2"),
    slow_layouts=(
        *("pp2", "cp2", "dp2", "tp2_sp_ep2", "tp2_sp_etp1"),
        *("pp2_interleaved", "recompute_core", "recompute_full", "tp2_sp_recompute_full"),
    ),
    only={"pp2_interleaved": ["pro"]},
    controls=CONTROLS,
    switches={what: ("flash", "one", patch) for what, patch in SWITCHES.items()},
    refused=[(config_with(**changes), named) for changes, named in REFUSED],
    layouts_accepted=[(config_with(), ParallelSizes(tp=2, ep=4, cp=2, sequence_parallel=True))],
    layouts_refused=[
        (config_with(), sizes, named)
        for sizes, named in [
            (ParallelSizes(tp=2), "--tensor-model-parallel-size 2 .* needs --sequence-parallel"),
            (ParallelSizes(tp=4, sequence_parallel=True), "-size 4 does not divide the model's o_groups 2"),
            (ParallelSizes(ep=3), "--expert-model-parallel-size 3"),
        ]
    ],
    fill=draw_experts,
    save=save,
    # Of hyper-connections: a norm follows what is read, so that the size of a share has no effect.
    gradient_floor=1e-2,
)
