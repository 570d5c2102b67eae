"""The rules of hooks' flags, broken once each, and what they allow."""

import pytest

from miles.config.hooks import HooksConfig
from miles.config.hooks_rules import FILTERS, HOOKS_RULES
from miles.config.resolve import ConfigError, resolve

SUPERVISED = {"loss_type": "sft_loss", "rm_type": None}
CASES = {
    "_dotted_paths": [
        *(({name: "mine/hook.py"}, " mine/hook.py must be the dotted path of a function, such as my_module.my_function")
          for name in (*HooksConfig.model_fields, "dynamic_sampling_filter_path")),
        ({"buffer_filter_path": "hook", "partial_rollout": ""}, "--buffer-filter-path hook must be the dotted path of"),
    ],
    "_never_called": [
        ({**SUPERVISED, "custom_generate_function_path": "a.b"},
         "--custom-generate-function-path would never be called: it needs samples to learn from, not --loss-t"),
        ({**SUPERVISED, "dynamic_sampling_filter_path": "a.b"},
         "--dynamic-sampling-filter-path would never be called: it needs samples to learn from, not --loss-t"),
        ({**SUPERVISED, "custom_reward_post_process_path": "a.b"},
         "--custom-reward-post-process-path would never be called: it needs samples to learn from, not --loss-t"),
        ({**SUPERVISED, "rollout_data_postprocess_path": "a.b"},
         "--rollout-data-postprocess-path would never be called: it needs a trainer with advantages; give that,"),
        ({"debug_rollout_only": "", "rollout_data_postprocess_path": "a.b"},
         "--rollout-data-postprocess-path would never be called: it needs a trainer with advantages; give that,"),
    ],
    "_rollout_function": [
        ({"rollout_function_path": "a.b", name: "a.b"},
         f"--{name.replace('_', '-')} would never be called: --rollout-function-path makes the whole rollout; drop one")
        for name in FILTERS
    ],
}  # fmt: skip


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in HOOKS_RULES]


@pytest.mark.parametrize(("changes", "message"), [case for cases in CASES.values() for case in cases])
def test_broken_rule(argv, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    (problem,) = [problem for problem in caught.value.problems if message in problem]
    assert problem.startswith("--")


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_function_path": "a.b", "custom_generate_function_path": "c.d"},
        {**SUPERVISED, "rollout_function_path": "a.b", "rollout_sample_filter_path": "c.d"},
        {"load_debug_rollout_data": "{rollout_id}.jsonl", "rollout_function_path": "a.b"},
        {"load_debug_rollout_data": "{rollout_id}.jsonl", "dynamic_sampling_filter_path": "a.b"},
        {"data_source_path": "a.B", "prompt_data": None},
        {"eval_interval": "2", "eval_function_path": "a.b", "custom_eval_rollout_log_function_path": "c.d"},
        {"num_rollout": "0", "eval_function_path": "a.b", "custom_eval_rollout_log_function_path": "c.d"},
        {"dynamic_sampling_filter_path": "a.b", "buffer_filter_path": "c.d"},
    ],
)
def test_allowed(argv, folder, changes):
    for rollout_id in range(3):
        (folder / f"{rollout_id}.jsonl").touch()
    resolve(argv(**changes))
