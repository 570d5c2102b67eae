"""What follows where samples are loaded, and where a run only evaluates."""

import pytest

from miles.config.resolve import resolve

SAVE, LOAD = "save_debug_rollout_data", "load_debug_rollout_data"
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


def test_details_are_samples(argv, folder):
    config = resolve(argv(dump_details="d")).config
    assert config.save_debug_rollout_data == f"{folder}/d/rollout_data/{{rollout_id}}.jsonl"
    config = resolve(argv(dump_details="d", **{SAVE: "t/{rollout_id}.jsonl"})).config
    assert config.save_debug_rollout_data == f"{folder}/t/{{rollout_id}}.jsonl"
    assert resolve(argv(dump_details="d", **{LOAD: "s/{rollout_id}.jsonl"})).config.save_debug_rollout_data is None
