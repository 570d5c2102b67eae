"""What looks into a run, or runs one half of it."""

import pytest

from miles.config import debug_rules
from miles.config.resolve import ConfigError, resolve

SAVE, LOAD = "save_debug_rollout_data", "load_debug_rollout_data"
SFT = {"loss_type": "sft_loss", "rm_type": None}
CASES = {
    "_halves": [
        ({"debug_rollout_only": "", "debug_train_only": ""},
         "--debug-rollout-only starts no trainer and --debug-train-only starts no engine: nothing is left to run"),
        ({"debug_rollout_only": "", **SFT}, "starts no trainer and --loss-type sft_loss starts no engine"),
        ({"debug_rollout_only": "", LOAD: "s/{rollout_id}.jsonl"}, "no trainer and --load-debug-rollout-data starts n"),
        ({"debug_train_only": ""}, "policy_loss learns from engines' samples; give --load-debug-rollout-data, the fil"),
        ({"debug_train_only": "", "loss_type": "custom_loss", "custom_loss_function_path": "a.b"},
         "but custom_loss learns from engines' samples; give --load-debug-rollout-data"),
    ],
    "_sample_files": [
        ({SAVE: "s/{rollout_id}_{step}.jsonl"}, "{step}.jsonl: the only thing in braces may be {rollout_id}"),
        ({LOAD: "s/{rollout_id:03}.jsonl"}, "the only thing in braces may be {rollout_id}"),
        ({SAVE: "s/{rollout_id}.json"}, "s/{rollout_id}.json must end in .jsonl, or in .jsonl.gz to be compressed"),
        ({LOAD: "s/{rollout_id}.pt"}, "--load-debug-rollout-data s/{rollout_id}.pt must end in .jsonl"),
    ],
    "_saved": [({SAVE: "s/all.jsonl"}, "--save-debug-rollout-data s/all.jsonl has no {rollout_id}, so that each")],
    "_loaded": [
        ({LOAD: "t/{rollout_id}.jsonl"}, "t/0.jsonl is no file here; give the path that --save-debug-rollout-data had"),
        ({LOAD: "s/{rollout_id}.jsonl", "num_rollout": "4"}, "s/3.jsonl is no file here; give the path"),
        ({LOAD: "t/{rollout_id}.jsonl", "num_rollout": None, "num_epoch": "1"}, "t/0.jsonl is no file here"),
    ],
}  # fmt: skip
RUNS_NOTHING = {
    "debug_train_only": True,
    "save_debug_rollout_data": None,
    "eval_interval": None,
    "rollout_num_gpus": 0,
    "colocate": False,
    "one_step_ahead": False,
    "fully_async": False,
}


@pytest.fixture(autouse=True)
def saved(folder):
    (folder / "s").mkdir()
    for rollout_id in range(3):
        (folder / f"s/{rollout_id}.jsonl").touch()


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in debug_rules.DEBUG_RULES]


@pytest.mark.parametrize(("changes", "message"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(message in problem for problem in caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    "changes",
    [
        {SAVE: "s/{rollout_id}.jsonl"},
        {SAVE: "new/folder/{rollout_id}/samples.jsonl.gz", "debug_rollout_only": "", "rollout_num_gpus": "2"},
        {SAVE: "s/{rollout_id}.jsonl", **SFT},
        {LOAD: "s/0.jsonl"},
        {LOAD: "t/{rollout_id}.jsonl", "load": "ckpt"},
        {LOAD: "s/{rollout_id}.jsonl", **SFT},
        {"debug_train_only": "", **SFT},
    ],
)
def test_accepted(argv, changes):
    resolve(argv(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {SAVE: "s/{rollout_id}.jsonl", "eval_interval": "2", "eval_prompt_data": "a held_out.jsonl"},
        {"no_offload_train": None, "no_offload_rollout": None, "check_residency": ""},
        {"colocate": None, "rollout_num_gpus": "2", "one_step_ahead": "", "update_weights_interval": "2"},
        {"colocate": None, "rollout_num_gpus": "2", "fully_async": "", "max_weight_staleness": "1"},
        {"partial_rollout": "", "over_sampling_batch_size": "16", "dynamic_sampling_filter_path": "a.b"},
        {"rm_type": None, "rollout_max_response_len": None},
    ],
)
def test_loading_can_be_added_to_any_command_line(argv, changes):
    resolved = resolve(argv(**changes, **{LOAD: "s/{rollout_id}.jsonl"}))
    config = resolved.config
    assert {name: getattr(config, name) for name in RUNS_NOTHING} == RUNS_NOTHING
    assert not config.needs_engines and config.needs_trainer and config.learns_from_samples
    assert not resolved.warnings
    if "eval_interval" in changes:
        assert resolved.provenance["eval_interval"].endswith("--load-debug-rollout-data: no engine runs")


def test_the_trainer_of_loaded_samples_is_the_one_of_generated_ones(argv):
    more = {"advantage_estimator": "ppo", "use_kl_loss": ""}
    for changes in (more, {"advantage_estimator": "dr_grpo"}, {"advantage_estimator": "reinforce_plus_plus"}):
        generated = resolve(argv(**changes)).config
        loaded = resolve(argv(**changes, **{LOAD: "s/{rollout_id}.jsonl"})).config
        for name in ("use_critic", "needs_reference", "ref_load", "critic_lr", "normalize_advantages"):
            assert getattr(loaded, name) == getattr(generated, name)
        assert loaded.constant_loss_length == generated.constant_loss_length
        assert loaded.lr_decay_iters == generated.lr_decay_iters


def test_a_run_that_only_evaluates_has_no_critic(argv):
    flags = {"advantage_estimator": "ppo", "eval_prompt_data": "a held_out.jsonl"}
    assert resolve(argv(**flags, eval_interval="1")).config.use_critic
    assert not resolve(argv(**flags, num_rollout="0")).config.use_critic
