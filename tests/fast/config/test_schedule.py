"""What follows for the schedule where one side does not run."""

import pytest

from miles.config.resolve import resolve

SPLIT = {"colocate": None, "no_offload_train": None, "no_offload_rollout": None, "rollout_num_gpus": "1"}


@pytest.mark.parametrize("more", [{}, {"debug_rollout_only": ""}, {"advantage_estimator": "ppo"}])
def test_an_evaluation_alone_needs_no_interval_and_no_critic(argv, more):
    resolved = resolve(argv(num_rollout="0", eval_prompt_data="a held_out.jsonl", **more))
    assert resolved.config.num_rollout == 0 and not resolved.config.use_critic
    assert resolved.warnings == []


@pytest.mark.parametrize("name", ["one_step_ahead", "fully_async"])
def test_where_no_engine_runs_nothing_overlaps(argv, name):
    resolved = resolve(argv(**SPLIT, **{name: "", "loss_type": "sft_loss", "update_weights_interval": "2"}))
    assert not resolved.config.overlaps
    assert resolved.provenance[name] == "derived: no engine runs with --loss-type sft_loss"
