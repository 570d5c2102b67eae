import asyncio
import copy
import json

import pytest

from miles.rollout.engine_pool import EnginesLost, RequestFailed
from miles.rollout.generate import EachAlone, Sampling
from miles.rollout.group_runner import GroupRunner, mask_older_versions, run_groups
from miles.rollout.hooks import Hooks
from miles.rollout.sample_buffer import SampleBuffer
from miles.rollout.user_functions import generate as user_generate
from miles.training.batch import TrainRows
from miles.utils.errors import UserError
from miles.utils.types import Sample
from miles.utils.user_code import guarded
from tests.fast.rollout.fake_pool import FakePool, FakePrompts, settle

COMPLETED, FAILED, ABORTED = Sample.Status.COMPLETED, Sample.Status.FAILED, Sample.Status.ABORTED


@pytest.fixture
def config(engine_config):
    return engine_config.model_copy(update={"rollout_sample_retries": 1})


def never():
    return False


async def run(config, pool, hooks=None, group=None, should_stop=never, teacher=None):
    runner = GroupRunner(config, pool, hooks or Hooks(), teacher)
    group = group or FakePrompts(4).get_samples(1)[0]
    result = await runner.run(group, Sampling.for_rollout(config), should_stop)
    assert result is group
    return runner, group


def statuses(group):
    return [sample.status for sample in group]


def answering(function):
    """A generate function that awaits `function(sample)` and completes the sample with the text it returns."""

    async def generate(config, sample, sampling_params):
        text = await function(sample)
        sample.tokens = [*sample.tokens, *range(len(text))]
        sample.response, sample.response_length, sample.status = text, len(text), COMPLETED
        sample.loss_mask, sample.rollout_log_probs = [1] * len(text), [-0.5] * len(text)
        return sample

    return generate


def users(function):
    """A generate function as `load_hooks` makes it."""
    return EachAlone(user_generate(guarded("--custom-generate-function-path my.function", function)))


async def test_a_group_is_one_request_and_is_rewarded(config):
    pool = FakePool(lambda sample: "a" if sample.index != 2 else "b")
    runner, group = await run(config, pool)
    assert pool.requests == [[0, 1, 2, 3]]
    assert [sample.reward for sample in group] == [1, 1, 0, 1]
    assert statuses(group) == [COMPLETED] * 4
    assert runner.tally.rewards[0].samples == 4


async def test_one_bad_member_leaves_the_others(config):
    """Of a group whose request fails, only the sample to blame is lost, after its retries."""
    pool = FakePool(lambda sample: RequestFailed("no") if sample.index == 1 else "a")
    runner, group = await run(config, pool)
    assert pool.requests == [[0, 1, 2, 3], [1]]
    assert statuses(group) == [COMPLETED, FAILED, COMPLETED, COMPLETED]
    assert group[1].remove_sample and group[1].reward is None and group[1].tokens == [1, 2]
    assert (runner.tally.failed, runner.tally.retried) == (1, 1)
    assert runner.tally.first_failure == "sample 1 of group 0: no"
    rows = TrainRows.from_samples(group, [0.0] * 4)
    assert [mask.tolist() for mask in rows["loss_masks"]] == [[1], [], [1], [1]]


async def test_a_request_that_fails_as_a_whole_is_tried_member_by_member(config):
    refused = {0, 1, 2, 3}

    def plan(sample):
        if sample.index not in refused:
            return "a"
        refused.discard(sample.index)
        return RequestFailed("not together")

    pool = FakePool(plan)
    runner, group = await run(config, pool)
    assert pool.requests == [[0, 1, 2, 3], [0], [1], [2], [3]]
    assert statuses(group) == [COMPLETED] * 4 and runner.tally.retried == 0


async def test_lost_engines_end_the_run(config):
    with pytest.raises(EnginesLost):
        await run(config, FakePool(lambda sample: EnginesLost("gone")))

    async def lost(sample):
        raise EnginesLost("gone")

    with pytest.raises(EnginesLost):
        await run(config, FakePool(), Hooks(generate=users(answering(lost))))


async def test_a_generate_function_that_raises_is_asked_again(config, caplog):
    seen = []

    async def answer(sample):
        seen.append(sample.index)
        sample.tokens.append(77)  # what it does to its sample is forgotten
        if sample.index == 3 or seen.count(sample.index) == 1:
            raise KeyError("tool")
        sample.tokens.pop()
        return "a"

    runner, group = await run(config, FakePool(), Hooks(generate=users(answering(answer))))
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert statuses(group) == [COMPLETED, COMPLETED, COMPLETED, FAILED]
    assert group[3].tokens == [1, 2]
    assert (runner.tally.failed, runner.tally.retried) == (1, 4)
    failure = "--custom-generate-function-path my.function failed: KeyError: 'tool'"
    assert f"the generation failed 2 times for sample 3 of group 0: {failure}" in caplog.text


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(2), KeyboardInterrupt()])
async def test_a_generate_function_that_would_end_the_loop_fails_alone(config, error):
    async def ends_all(sample):
        if sample.index == 2:
            raise error
        return "a"

    runner, group = await run(config, FakePool(), Hooks(generate=users(answering(ends_all))))
    assert statuses(group) == [COMPLETED, COMPLETED, FAILED, COMPLETED]
    assert [sample.reward for sample in group] == [1, 1, None, 1]
    assert "sample 2 of group 0: --custom-generate-function-path my.function failed: " in runner.tally.first_failure


async def test_a_prompt_that_a_generate_function_rewrote_is_asked_as_it_was(config):
    async def rewriting(config, sample, sampling_params):
        sample.metadata["seen"] = True
        sample.tokens, sample.response, sample.response_length, sample.status = [7, 8, 9, 1], "a", 1, COMPLETED
        sample.loss_mask, sample.rollout_log_probs = [1], [-0.5]
        return sample

    _, group = await run(config, FakePool(), Hooks(generate=users(rewriting)))
    buffer = SampleBuffer()
    buffer.ask_again(group)
    assert [(sample.tokens, sample.metadata) for sample in buffer.unfinished[0]] == [([1, 2], {})] * 4


async def test_failures_above_the_bound_stop_the_run(config):
    runner, group = await run(config, FakePool(lambda sample: RequestFailed("no") if sample.index == 1 else "a"))
    runner.check(20)  # 5 %
    with pytest.raises(UserError, match=r"generation of 1 of 19 samples failed; .* allows 0.05. The first: sample 1"):
        runner.check(19)


async def test_failed_rewards_above_the_bound_stop_the_run(config):
    group = FakePrompts(4).get_samples(1)[0]
    group[1].label = None
    runner, _ = await run(config, FakePool(), group=group)
    runner.check(20)
    with pytest.raises(UserError, match=r"^exact: the reward failed for 1 of 4 samples"):
        runner.check(19)


async def test_several_pieces_share_the_reward_of_the_last(config):
    async def generate(config, sample, sampling_params):
        pieces = [copy.deepcopy(sample) for _ in range(2)]
        for piece, text in zip(pieces, ("context", "a"), strict=True):
            await answering(lambda _, text=text: asyncio.sleep(0, text))(config, piece, sampling_params)
        pieces[0].tokens = [9, 9, 9, *pieces[0].tokens]  # a prompt of its own
        return pieces

    _, group = await run(config, FakePool(), Hooks(generate=users(generate)))
    assert [sample.trajectory for sample in group] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [sample.reward for sample in group] == [1.0] * 8
    TrainRows.from_samples(group, [0.0] * 8)

    saved = json.loads(json.dumps([sample.to_dict() for sample in group]))
    buffer = SampleBuffer()
    buffer.ask_again([Sample.from_dict(fields) for fields in saved])
    assert [(sample.index, sample.tokens, sample.status) for sample in buffer.unfinished[0]] == [
        (i, [1, 2], Sample.Status.PENDING) for i in range(4)
    ]


async def test_a_reward_that_the_generate_function_set_stays(config):
    async def generate(config, sample, sampling_params):
        sample.reward = 0.25
        return await answering(lambda _: asyncio.sleep(0, "a"))(config, sample, sampling_params)

    runner, group = await run(config, FakePool(), Hooks(generate=users(generate)))
    assert [sample.reward for sample in group] == [0.25] * 4 and not runner.tally.rewards


async def test_aborted_by_nobody_is_a_failure(config):
    """Not asked for ever."""

    async def generate(config, sample, sampling_params):
        sample.status = ABORTED
        return sample

    runner, group = await run(config, FakePool(), Hooks(generate=users(generate)))
    assert statuses(group) == [FAILED] * 4
    assert "returned it as aborted, and nothing had cut it off" in runner.tally.first_failure


@pytest.mark.parametrize("partial", [True, False])
async def test_cut_off_by_a_weight_sync(config, partial):
    """Goes on with its tokens, or is written anew: then it has one version of the weights, however often it happens."""
    config = config.model_copy(update={"partial_rollout": partial})
    pool = FakePool(lambda sample: None)
    task = asyncio.create_task(run(config, pool))
    for version in ("1", "2"):
        pool.version = version
        await settle()
        assert pool.waiting == [0, 1, 2, 3]
        await pool.hold()
        await settle()
        assert pool.waiting == [] and not task.done()
        pool.release()
    pool.version = "3"
    await settle()
    pool.finish(0, 1, 2, 3)
    _, group = await task
    assert [sample.weight_versions for sample in group] == [["1", "2", "3"] if partial else ["3"]] * 4
    assert [sample.response_length for sample in group] == [3 if partial else 1] * 4


@pytest.mark.parametrize("partial", [True, False])
async def test_cut_off_by_the_end_of_the_rollout(config, partial):
    config = config.model_copy(update={"partial_rollout": partial})
    pool, stopping = FakePool(lambda sample: "a" if sample.index else None), False
    group = FakePrompts(4).get_samples(1)[0]
    task = asyncio.create_task(run(config, pool, group=group, should_stop=lambda: stopping))
    await settle()
    stopping = True
    await pool.hold()
    runner, _ = await task
    assert [sample.reward for sample in group] == [None] * 4, "rewarded when all are finished"
    assert statuses(group)[1:] == [COMPLETED] * 3, "what is finished stays"
    assert (group[0].status, len(group[0].tokens)) == ((ABORTED, 3) if partial else (Sample.Status.PENDING, 2))
    pool.release()
    stopping, pool.plan = False, lambda sample: "a"
    await runner.run(group, Sampling.for_rollout(config), never)
    assert pool.requests[-1] == [0]
    assert [sample.reward for sample in group] == [0.0 if partial else 1.0, 1.0, 1.0, 1.0]


async def test_a_generate_function_is_not_called_while_the_pool_is_held(config):
    """It could only return what it was given, which would count as a failure."""
    pool = FakePool()

    async def generate(config, sample, sampling_params):
        await pool.complete([sample], [sampling_params])
        return sample

    await pool.hold()
    task = asyncio.create_task(run(config, pool, Hooks(generate=users(generate))))
    await settle()
    assert not pool.requests
    pool.release()
    runner, group = await task
    assert statuses(group) == [COMPLETED] * 4 and runner.tally.retried == 0


@pytest.mark.parametrize("users_own", [False, True])
async def test_what_was_held_back_begins_nothing_once_the_rollout_ends(config, users_own):
    pool, stopping, hooks = FakePool(), False, Hooks()
    if users_own:
        hooks = Hooks(generate=users(answering(lambda sample: pool.complete([sample], [{}]))))
    await pool.hold()
    task = asyncio.create_task(run(config, pool, hooks, should_stop=lambda: stopping))
    await settle()
    stopping = True
    pool.release()
    _, group = await task
    assert not pool.requests and statuses(group) == [Sample.Status.PENDING] * 4


@pytest.mark.parametrize("partial", [True, False])
async def test_a_generate_function_that_was_cut_off_goes_on(config, partial):
    config = config.model_copy(update={"partial_rollout": partial})
    pool = FakePool(lambda sample: None)

    async def generate(config, sample, sampling_params):
        await pool.complete([sample], [sampling_params])
        return sample

    task = asyncio.create_task(run(config, pool, Hooks(generate=users(generate))))
    await settle()
    await pool.hold()
    pool.version, pool.plan = "2", lambda sample: "a"
    pool.release()
    runner, group = await task
    assert [sample.weight_versions for sample in group] == [["1", "2"] if partial else ["2"]] * 4
    assert runner.tally.retried == 0


async def test_a_group_can_be_saved_while_a_generate_function_is_at_work(config):
    busy = asyncio.Event()

    async def answer(sample):
        sample.tokens.append(3)
        await busy.wait()
        sample.tokens.pop()
        return "a"

    group = FakePrompts(4).get_samples(1)[0]
    task = asyncio.create_task(run(config, FakePool(), Hooks(generate=users(answering(answer))), group=group))
    await settle()
    assert [(sample.tokens, sample.status.value) for sample in group] == [([1, 2], "pending")] * 4
    busy.set()
    await task


async def test_a_cancelled_group_leaves_no_task(config):
    before = asyncio.all_tasks()
    pool = FakePool(lambda sample: None)
    task = asyncio.create_task(run(config, pool, Hooks(generate=users(answering(lambda sample: asyncio.sleep(1000))))))
    await settle()
    assert len(asyncio.all_tasks()) > len(before) + 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == before


class FakeTeacher:
    def __init__(self, error=None):
        self.error = error

    async def score(self, samples):
        if self.error is not None:
            raise self.error
        for sample in samples:
            sample.teacher_log_probs = [-1.0] * sample.response_length


async def test_the_teacher_looks_at_what_did_not_fail(config):
    pool = FakePool(lambda sample: RequestFailed("no") if sample.index == 1 else "a")
    _, group = await run(config, pool, teacher=FakeTeacher())
    assert [sample.teacher_log_probs for sample in group] == [[-1.0], [], [-1.0], [-1.0]]
    TrainRows.from_samples(group, [0.0] * 4)
    with pytest.raises(RuntimeError, match="teacher is gone"):
        await run(config, pool, teacher=FakeTeacher(RuntimeError("teacher is gone")))


def test_only_tokens_of_the_newest_weights_count():
    sample = Sample(response_length=6, loss_mask=[1, 1, 0, 1, 1, 1], weight_versions=["1", "2", "2"])
    sample.weight_version_lengths = [2, 3, 1]
    mask_older_versions(sample)
    assert sample.loss_mask == [0, 0, 0, 1, 1, 1]
    mask_older_versions(sample)
    assert sample.loss_mask == [0, 0, 0, 1, 1, 1]
    sample.weight_version_lengths = []
    with pytest.raises(ValueError, match="weight_versions 1, 2, 2 and no weight_version_lengths"):
        mask_older_versions(sample)


async def test_run_groups(config):
    groups = FakePrompts(2).get_samples(3)
    runner = GroupRunner(config, FakePool(), Hooks(), evaluation=True)
    done = []

    class Bar:
        update = staticmethod(done.append)

    assert await run_groups(runner, groups, Sampling.for_rollout(config), Bar) == groups
    assert done == [2, 2, 2] and all(sample.reward == 1 for group in groups for sample in group)


async def test_the_first_error_of_run_groups_ends_all(config):
    before = asyncio.all_tasks()
    groups = FakePrompts(2).get_samples(3)
    runner = GroupRunner(config, FakePool(lambda s: None if s.index < 4 else RequestFailed("no")), Hooks())
    with pytest.raises(UserError, match=r"generation of 2 of 6 samples failed"):
        await run_groups(runner, groups, Sampling.for_rollout(config))
    assert asyncio.all_tasks() == before
