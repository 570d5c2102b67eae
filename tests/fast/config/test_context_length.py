"""The lengths and sizes of a rollout that follow from the model."""

import json

import pytest

from miles.config.resolve import resolve

ASYNC = {"colocate": None, "rollout_num_gpus": "4", "fully_async": ""}


@pytest.fixture(autouse=True)
def context(folder):
    """The model says how long its context is."""
    shape = json.loads((folder / "model/config.json").read_text()) | {"max_position_embeddings": 512, "vocab_size": 260}
    (folder / "model/config.json").write_text(json.dumps(shape))


def test_sizes_that_follow(argv):
    config = resolve(argv()).config
    assert config.over_sampling_batch_size == 8 and config.async_max_concurrent_samples is None
    assert resolve(argv(**ASYNC)).config.async_max_concurrent_samples == 32


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ({}, {}, (505, 504, 505)),
        ({}, {"rollout_max_context_len": "512"}, (505, 504, 505)),
        ({}, {"rollout_max_context_len": "100"}, (100, 99, 100)),
        ({}, {"rollout_max_context_len": "100", "eval_max_context_len": "510"}, (100, 99, 505)),
        ({}, {"sglang_context_length": "107"}, (100, 99, 100)),
        ({}, {"sglang_context_length": "0.5k"}, (493, 492, 493)),
        ({"rope_scaling": YARN}, {}, (2041, 2040, 2041)),
        ({"rope_parameters": YARN}, {}, (2041, 2040, 2041)),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 128}}, {}, (505, 504, 505)),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {}, (505, 504, 505)),
        ({"text_config": {"max_position_embeddings": 64}}, {}, (57, 56, 57)),
        ({"seq_length": 100}, {}, (93, 92, 93)),
        ({}, {"sglang_json_model_override_args": '{"max_position_embeddings":99}'}, (92, 91, 92)),
        ({"max_position_embeddings": None}, {}, (None, None, None)),
        ({}, {"loss_type": "sft_loss"}, (None, None, None)),
    ],
)
def test_the_context_that_follows_from_the_model(argv, folder, shape, changes, expected):
    file = folder / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | shape))
    config = resolve(argv(**changes)).config
    assert (config.rollout_max_context_len, config.rollout_max_prompt_len, config.eval_max_context_len) == expected


def test_a_longer_context_where_sglang_is_told_to_take_it(argv, monkeypatch):
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert resolve(argv(sglang_context_length="1007")).config.rollout_max_context_len == 1000
