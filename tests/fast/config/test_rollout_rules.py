"""Every rule of collecting samples, broken once."""

import json

import pytest

from miles.config.resolve import ConfigError, resolve
from miles.config.rollout_rules import NONZERO_STD, ROLLOUT_RULES

ASYNC = {"colocate": None, "rollout_num_gpus": "4", "fully_async": ""}
CASES = {
    "_over_sampling": [
        ({"over_sampling_batch_size": "4"},
         "--over-sampling-batch-size 4 is less than --rollout-batch-size 8: so few prompts never make a rollout; give "
         "at least 8"),
        ({"over_sampling_batch_size": "12", **ASYNC}, "--over-sampling-batch-size 12 has no effect with --fully-async"),
    ],
    "_masked_versions": [
        ({"mask_offpolicy_in_partial_rollout": ""}, "which needs --partial-rollout; add that, or drop it"),
    ],
    "_equal_rewards": [
        ({"dynamic_sampling_filter_path": NONZERO_STD, "n_samples_per_prompt": "1",
          "disable_rewards_normalization": ""}, "refuses every group of --n-samples-per-prompt 1"),
        ({"dynamic_sampling_filter_path": NONZERO_STD, "rm_type": None, "label_key": None, "use_opd": "",
          "opd_type": "megatron", "opd_teacher_load": "model"}, "refuses every group without a reward"),
    ],
    "_rollouts_of_the_user": [
        ({"rollout_function_path": "a.b", "over_sampling_batch_size": "12"}, "--over-sampling-batch-size 12 has no ef"),
        ({"rollout_function_path": "a.b", "partial_rollout": ""}, "--partial-rollout has no effect: --rollout-func"),
        ({"rollout_function_path": "a.b", "max_weight_staleness": "1"}, "--max-weight-staleness 1 has no effect"),
    ],
    "context_problems": [
        ({"rollout_max_context_len": "513"}, "--rollout-max-context-len 513 is more than the 512 tokens of the model"),
        ({"eval_max_context_len": "513"}, "--eval-max-context-len 513 is more than the 512 tokens of the model's"),
        ({"sglang_context_length": "99", "rollout_max_context_len": "100"}, "the 99 tokens of --sglang-context-length"),
        ({"sglang_context_length": "513"}, "--sglang-context-length 513 is more than the 512 tokens of the model's"),
        ({"sglang_context_length": "1Mi"}, "--sglang-context-length 1Mi is more than the 512 tokens of the model's"),
        ({"sglang_context_length": "all"}, "--sglang-context-length all is no number of tokens, such as 32768, 32k or"),
        ({"sglang_context_length": "8"}, "--sglang-context-length 8 leaves no room: SGLang keeps 7 tokens of it"),
        ({"sglang_json_model_override_args": "{"}, "--sglang-json-model-override-args is not a JSON object"),
    ],
    "_stop_ids": [
        ({"rollout_stop_token_ids": "1 260"}, "--rollout-stop-token-ids: the model has no token 260, its vocabulary"),
        ({"rollout_stop_token_ids": "-1"}, "--rollout-stop-token-ids is ['-1']: token ids count from 0"),
    ],
}  # fmt: skip


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in ROLLOUT_RULES]


@pytest.fixture(autouse=True)
def context(folder):
    """The model says how long its context is."""
    shape = json.loads((folder / "model/config.json").read_text()) | {"max_position_embeddings": 512, "vocab_size": 260}
    (folder / "model/config.json").write_text(json.dumps(shape))


@pytest.mark.parametrize(("changes", "expected"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(expected in problem for problem in caught.value.problems) == 1, caught.value.problems
    assert len(caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    "changes",
    [
        {"over_sampling_batch_size": "12", "partial_rollout": "", "mask_offpolicy_in_partial_rollout": ""},
        {"over_sampling_batch_size": "8", "max_weight_staleness": "0"},
        {"dynamic_sampling_filter_path": NONZERO_STD, "dynamic_sampling_max_batches": "1"},
        {**ASYNC, "partial_rollout": "", "max_weight_staleness": "2"},
    ],
)
def test_accepted(argv, changes):
    assert resolve(argv(**changes)).warnings == []


def test_partial_rollout_of_nothing_cut_off(argv):
    (warning,) = resolve(argv(partial_rollout="")).warnings
    assert warning.startswith("--partial-rollout has no effect: no response is cut off without --fully-async")


def test_sizes_that_follow(argv):
    config = resolve(argv()).config
    assert config.over_sampling_batch_size == 8 and config.async_max_concurrent_samples is None
    assert resolve(argv(**ASYNC)).config.async_max_concurrent_samples == 32


@pytest.mark.parametrize("lone", [{"debug_train_only": "", "loss_type": "sft_loss", "label_key": "answer"}])
def test_nothing_is_said_where_no_engine_runs(argv, lone):
    resolve(argv(over_sampling_batch_size="4", mask_offpolicy_in_partial_rollout="", **lone))


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
