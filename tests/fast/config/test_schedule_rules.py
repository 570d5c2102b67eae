"""The rules of the schedules, broken once each, what they allow, and what follows from a debug mode."""

import pytest

from miles.config.resolve import ConfigError, resolve
from miles.config.schedule_rules import SCHEDULE_RULES

SPLIT = {"colocate": None, "no_offload_train": None, "no_offload_rollout": None, "rollout_num_gpus": "1"}
AHEAD, ASYNC = SPLIT | {"one_step_ahead": ""}, SPLIT | {"fully_async": ""}
CASES = {
    "_one_schedule": [(AHEAD | ASYNC, "--one-step-ahead and --fully-async are two schedules")],
    "_own_gpus": [
        ({"one_step_ahead": ""}, "--one-step-ahead generates while the trainer computes, and with --colocate both"),
        ({"fully_async": ""}, "--fully-async generates while the trainer computes"),
    ],
    "_sync_interval": [
        ({"update_weights_interval": "2"}, "--update-weights-interval 2 needs --one-step-ahead or --fully-async"),
    ],
    "_whole_group": [
        (ASYNC | {"async_max_concurrent_samples": "3"}, "--async-max-concurrent-samples 3 is less than one group of"),
    ],
    "_whole_rollouts_of_the_user": [
        (
            ASYNC | {"rollout_function_path": "a.b"},
            "--rollout-function-path a.b makes a whole rollout when it",
        ),
    ],
}


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in SCHEDULE_RULES]


@pytest.mark.parametrize(("changes", "message"), [case for cases in CASES.values() for case in cases])
def test_broken_rule(argv, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize(
    "changes",
    [
        AHEAD | {"update_weights_interval": "2"},
        AHEAD | {"rollout_function_path": "a.b"},
        ASYNC | {"update_weights_interval": "3", "async_max_concurrent_samples": "4"},
        ASYNC | {"max_weight_staleness": "2", "async_unused_samples_handler": "drop"},
        # Debug modes are added to any command line.
        AHEAD | {"debug_rollout_only": "", "update_weights_interval": "2"},
        ASYNC | {"debug_rollout_only": ""},
    ],
)
def test_allowed(argv, changes):
    assert resolve(argv(**changes)).warnings == []


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


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"async_max_concurrent_samples": "8"}, "--async-max-concurrent-samples 8 has no effect without --fully-async"),
        ({"async_data_buffer_capacity_factor": "3"}, "--async-data-buffer-capacity-factor 3.0 has no effect"),
        (AHEAD | {"async_unused_samples_handler": "drop"}, "--async-unused-samples-handler drop has no effect without"),
        (ASYNC | {"async_unused_samples_handler": "drop"}, "drop has no effect without --max-weight-staleness"),
    ],
)
def test_what_has_no_effect_is_said(argv, changes, warning):
    (said,) = resolve(argv(**changes)).warnings
    assert warning in said
