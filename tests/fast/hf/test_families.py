"""What config.json means, family by family, and the parallel sizes that follow from it."""

import pytest
import transformers

from miles.hf.families import SHAPES, shape_of
from miles.hf.parallel import ParallelSizes

DENSE = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=67)
EXPERTS = DENSE | dict(num_experts=8)
LATENT = DENSE | dict(kv_lora_rank=16, num_key_value_heads=8)
DELTA = DENSE | dict(linear_num_key_heads=6)


@pytest.mark.parametrize(
    "kind, fields, expected",
    [
        ("Qwen3Config", {}, ""),
        ("Qwen3MoeConfig", dict(num_experts=8, decoder_sparse_step=2, mlp_only_layers=[3]), "1"),
        ("Qwen3NextConfig", dict(num_experts=0), ""),
        ("DeepseekV3Config", dict(n_routed_experts=8, first_k_dense_replace=1), "123"),
        (
            "Glm4MoeLiteConfig",
            dict(n_routed_experts=8, mlp_layer_types=["dense", "dense", "sparse", "sparse"]),
            "23",
        ),
        ("GptOssConfig", dict(num_local_experts=8), "0123"),
        ("Llama4TextConfig", dict(num_local_experts=8, interleave_moe_layer_step=2), "13"),
        ("Llama4TextConfig", dict(num_local_experts=8, moe_layers=[]), ""),
        ("Qwen3_5MoeTextConfig", dict(num_experts=8), "0123"),
        ("DeepseekV4Config", dict(n_routed_experts=8), "0123"),
    ],
)
def test_layers_with_experts(kind, fields, expected):
    shape = shape_of(getattr(transformers, kind)(**DENSE, **fields).to_dict())
    assert [layer for layer in range(4) if shape.has_experts(layer)] == [int(layer) for layer in expected]
    assert bool(shape.num_experts) == bool(expected)


def test_model_types_are_those_of_transformers():
    for kind in SHAPES:
        for model_type in kind.model_types:
            assert transformers.AutoConfig.for_model(model_type).model_type == model_type


@pytest.mark.parametrize(
    "fields, sizes, said",
    [
        (DENSE, dict(tp=4), []),
        (DENSE, dict(tp=8), ["--tensor-model-parallel-size 8 does not divide the model's num_key_value_heads 4"]),
        (DENSE, dict(ep=2), ["--expert-model-parallel-size 2 needs a model with experts"]),
        (EXPERTS, dict(ep=3), ["--expert-model-parallel-size 3 does not divide the model's 8 experts"]),
        (EXPERTS, dict(tp=2), ["of a model with experts needs --sequence-parallel"]),
        (EXPERTS, dict(tp=2, ep=4, sequence_parallel=True), []),
        (LATENT, dict(tp=2), ["of a model with latent attention needs --sequence-parallel"]),
        (DELTA, dict(tp=2), ["of a model with gated delta nets needs --sequence-parallel"]),
        (DELTA, dict(tp=2, cp=3, sequence_parallel=True), []),
        (DELTA, dict(tp=2, cp=2, sequence_parallel=True), ["times --context-parallel-size 2 does not divide"]),
        (EXPERTS | dict(model_type="gpt_oss"), dict(tp=2, etp=2, sequence_parallel=True), ["which Megatron cannot do"]),
        (EXPERTS, dict(tp=3, ep=3), ["num_attention_heads 8", "num_key_value_heads 4", "8 experts", "sequence"]),
    ],
)
def test_parallel_sizes_that_a_model_cannot_have(fields, sizes, said):
    problems = shape_of(fields).layout_problems(ParallelSizes(**sizes))
    assert len(problems) == len(said) and all(part in text for part, text in zip(said, problems, strict=True)), problems


COMPRESSED = DENSE | dict(
    model_type="deepseek_v4",
    num_key_value_heads=1,
    o_groups=4,
    n_routed_experts=8,
    num_nextn_predict_layers=1,
    compress_ratios=[0, 4, 128, 4, 0],
)


@pytest.mark.parametrize(
    "changes, tp, said",
    [
        ({}, 4, []),
        ({}, 8, ["--tensor-model-parallel-size 8 does not divide the model's o_groups 4"]),
        ({"compress_ratios": [0, 4, 128, 4]}, 1, ["has 4 compress_ratios for 4 layers and 1 next-token layers"]),
        ({"compress_ratios": [1, 4, 2, 4, 0]}, 1, ["compress_ratios of 1, 2 beside 0, 4 and 128: a later model"]),
    ],
)
def test_deepseek_v4_has_one_key_and_groups_of_heads(changes, tp, said):
    problems = shape_of(COMPRESSED | changes).layout_problems(ParallelSizes(tp=tp, sequence_parallel=True))
    assert len(problems) == len(said) and all(part in text for part, text in zip(said, problems, strict=True)), problems


def test_deepseek_v4_is_the_same_as_published_and_as_transformers_completes_it():
    published = shape_of(COMPRESSED | dict(compress_ratios=[0, 4, 128, 128, 0]))
    completed = shape_of(transformers.DeepseekV4Config(**published.fields).to_dict())
    for layer in range(4):
        assert published.layer_type(layer) == completed.layer_type(layer)
        assert published.ratio(layer) == completed.ratio(layer)
