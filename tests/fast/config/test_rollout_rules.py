"""Every rule of collecting samples, broken once."""

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
}  # fmt: skip


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in ROLLOUT_RULES]


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
