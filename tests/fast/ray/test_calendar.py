"""What is due at a rollout, beside what the flags mean, told rollout by rollout."""

from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config import RunConfig
from miles.ray.calendar import Due, due, is_evaluated_first, rollouts

EVERY = RunConfig.model_construct().model_dump()


def config(**changes):
    return RunConfig.model_construct(**(EVERY | changes))


def every(interval):
    """Endlessly: is this rollout the last of `interval`? An interval of None has no last one."""
    waited = 0
    while True:
        waited += 1
        yield waited == interval
        if waited == interval:
            waited = 0


def told(c):
    """The whole run from its first rollout on, by the words of the flags' help."""
    left = list(range(c.num_rollout))
    critic_only = c.num_critic_only_steps if c.use_critic else 0
    alarms = zip(every(c.save_interval), every(c.eval_interval), every(c.update_weights_interval), strict=True)
    while left:
        rollout_id, (save_alarm, eval_alarm, sync_alarm) = left.pop(0), next(alarms)
        saves = (c.save or c.save_hf) and (save_alarm or not left)
        evaluates = c.eval_interval and (eval_alarm or not left)
        yield Due(
            actor_training=rollout_id not in range(critic_only),
            save=bool(saves),
            evaluation=bool(evaluates),
            sync=bool(sync_alarm or saves or evaluates),
            next_rollout=bool(left),
        )


INTERVALS = st.none() | st.integers(1, 9)


@settings(deadline=None)
@given(
    num_rollout=st.integers(1, 20),
    save=st.sampled_from([None, "checkpoints"]),
    save_hf=st.sampled_from([None, "hf_{rollout_id}"]),
    save_interval=INTERVALS,
    eval_interval=INTERVALS,
    update_weights_interval=st.integers(1, 9),
    advantage_estimator=st.sampled_from(["grpo", "ppo"]),
    num_critic_only_steps=st.integers(0, 9),
)
def test_what_is_due_is_what_the_flags_mean(**flags):
    run = config(**flags)
    assert [due(run, rollout_id) for rollout_id in range(run.num_rollout)] == list(told(run))


def test_a_run_without_flags_syncs_after_each_rollout_and_does_nothing_else():
    run = config(num_rollout=2)
    nothing = {"actor_training": True, "save": False, "evaluation": False, "sync": True}
    assert [due(run, rollout_id) for rollout_id in range(2)] == [
        Due(**nothing, next_rollout=True),
        Due(**nothing, next_rollout=False),
    ]


def test_a_new_run_with_evaluations_begins_with_one():
    run = config(num_rollout=3, eval_interval=2)
    assert is_evaluated_first(run, 0)
    assert not is_evaluated_first(run, 1)  # a resumed one
    assert not is_evaluated_first(config(num_rollout=3, eval_interval=2, skip_eval_before_train=True), 0)
    assert not is_evaluated_first(config(num_rollout=3), 0)


def test_the_rollouts_of_a_resumed_run_are_those_that_are_left():
    assert list(rollouts(config(num_rollout=4), 2)) == [2, 3]
    assert list(rollouts(config(num_rollout=0), 3)) == []
