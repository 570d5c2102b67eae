"""A rollout at a time."""

import asyncio
import json

import pytest

from miles.rollout.engine_pool import RequestFailed
from miles.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from miles.rollout.hooks import Hooks
from miles.rollout.user_functions import buffer_filter, dynamic_filter
from miles.utils.errors import UserError
from miles.utils.user_code import FunctionFailed, guarded
from tests.fast.rollout.collecting import SIZE, counts, make, members, numbers, small_rollouts, waiting
from tests.fast.rollout.fake_pool import FakePool, FakePrompts, settle


@pytest.fixture
def config(engine_config):
    return small_rollouts(engine_config)


async def test_without_over_sampling_all_that_is_asked_is_trained_on(config):
    before, pool = asyncio.all_tasks(), FakePool(lambda sample: None)
    collector = make(config, pool)
    task = asyncio.create_task(collector.collect(0, None))
    await settle()
    assert pool.waiting == members(0, 1)
    pool.finish(*members(1))
    await settle()
    pool.finish(*members(0))
    collected = await task
    assert numbers(collected.groups) == numbers(collected.all_groups) == [0, 1]
    assert all(sample.reward == 1 for group in collected.groups for sample in group)
    assert counts(collected) == {"new": 2, "trained": 2}
    assert pool.holds == 0 and waiting(collector) == ([], []) and asyncio.all_tasks() == before


async def test_groups_of_the_same_tick_are_not_lost(config):
    """Three groups finish at once where two are needed: the last of them is the first of the next rollout."""
    pool = FakePool(lambda sample: None)
    collector = make(config, pool, over_sampling_batch_size=3)
    task = asyncio.create_task(collector.collect(0, None))
    await settle()
    pool.finish(*members(2, 1, 0))
    first = await task
    assert numbers(first.groups) == [0, 1] and waiting(collector) == ([2], [])
    assert counts(first) == {"new": 3, "trained": 2, "surplus": 1}

    pool.plan = lambda sample: "a"
    second = await collector.collect(1, None)
    assert numbers(second.groups) == [2, 3] and waiting(collector) == ([4], [])
    assert counts(second) == {"new": 2, "from_buffer": 1, "trained": 2, "surplus": 1}
    assert members(2) not in pool.requests[3:], "a finished group is not asked again"


@pytest.mark.parametrize("partial", [True, False])
async def test_what_the_end_cuts_off_is_asked_first_next_time(config, partial):
    pool = FakePool(lambda sample: None if sample.group_index == 1 else "a")
    collector = make(config, pool, over_sampling_batch_size=3, partial_rollout=partial)
    first = await collector.collect(0, None)
    assert numbers(first.groups) == [0, 2] and waiting(collector) == ([], [1]) and pool.holds == 1
    assert counts(first) == {"new": 3, "trained": 2, "unfinished": 1}

    pool.plan, pool.version = lambda sample: "a", "2"
    second = await collector.collect(1, None)
    assert pool.requests[3:] == [members(1), members(3), members(4)]
    assert numbers(second.groups) == [1, 3]
    (continued, _) = second.groups
    assert [sample.weight_versions for sample in continued] == [["1", "2"] if partial else ["2"]] * SIZE
    assert [len(sample.tokens) for sample in continued] == [4 if partial else 3] * SIZE


async def test_only_the_newest_weights_are_trained_on(config):
    pool = FakePool(lambda sample: None if sample.group_index == 0 else "a")
    changes = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "over_sampling_batch_size": 3}
    collector = make(config, pool, **changes)
    await collector.collect(0, None)
    pool.plan, pool.version = lambda sample: "ab", "2"
    collected = await collector.collect(1, None)
    assert [group[0].loss_mask for group in collected.groups] == [[0, 1, 1], [1, 1]]


async def test_refused_groups_are_replaced_as_a_whole(config):
    """Groups 0 and 2 have equal rewards."""
    pool = FakePool(lambda sample: "b" if sample.index in (3, 7, 9) else "a")
    hooks = Hooks(keep_group=dynamic_filter(check_reward_nonzero_std))
    collected = await make(config, pool, hooks).collect(0, None)
    assert pool.requests == [members(0), members(1), members(2), members(3)]
    assert numbers(collected.groups) == [1, 3] and numbers(collected.all_groups) == [0, 1, 2, 3]
    assert counts(collected) == {"new": 4, "trained": 2, "filtered": 2}
    assert collected.metrics["rollout/dynamic_filter/keep_ratio"] == 0.5
    assert collected.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 2
    assert [len(group) for group in collected.groups] == [SIZE, SIZE]


async def test_a_filter_that_keeps_nothing_ends_the_run_with_numbers(config):
    before, pool = asyncio.all_tasks(), FakePool()
    collector = make(
        config, pool, Hooks(keep_group=dynamic_filter(check_reward_nonzero_std)), dynamic_sampling_max_batches=3
    )
    with pytest.raises(UserError) as caught:
        await collector.collect(7, None)
    assert (
        "rollout 7 tried 6 groups (--dynamic-sampling-max-batches 3 x --rollout-batch-size 2) and has 0 of the 2"
        in str(caught.value)
    )
    assert "0 passed, 6 were filtered as zero_std_1.0. Give prompts that are" in str(caught.value)
    assert "abstains" not in str(caught.value)
    assert asyncio.all_tasks() == before


async def test_a_rollout_that_needs_no_second_try_is_within_any_bound(config):
    assert numbers((await make(config, FakePool(), dynamic_sampling_max_batches=1).collect(0, None)).groups) == [0, 1]


async def test_a_filter_that_raises_ends_the_run(config):
    def refuse(config, samples):
        raise KeyError("mine")

    before = asyncio.all_tasks()
    refuse = guarded("--dynamic-sampling-filter-path my.filter", refuse)
    collector = make(config, FakePool(), Hooks(keep_group=dynamic_filter(refuse)))
    with pytest.raises(FunctionFailed, match="--dynamic-sampling-filter-path my.filter failed: KeyError: 'mine'"):
        await collector.collect(0, None)
    assert asyncio.all_tasks() == before and waiting(collector) == ([], [0, 1])


async def test_a_failed_sample_leaves_its_group(config):
    pool = FakePool(lambda sample: RequestFailed("no") if sample.index == 1 else "a")
    collected = await make(config, pool).collect(0, None)
    assert numbers(collected.groups) == [0, 1]
    assert [sample.status.value for sample in collected.groups[0]] == ["completed", "failed"]
    assert collected.metrics["rollout/failed_samples"] == 1 and collected.metrics["rollout/sample_retries"] == 2


async def test_a_group_without_a_sample_is_replaced(config):
    pool = FakePool(lambda sample: RequestFailed("no") if sample.group_index == 0 else "a")
    collected = await make(config, pool).collect(0, None)
    assert numbers(collected.groups) == [1, 2] and counts(collected) == {"new": 3, "trained": 2, "failed": 1}


async def test_too_many_failures_end_the_run(config):
    before = asyncio.all_tasks()
    pool = FakePool(lambda sample: RequestFailed("no") if sample.index == 1 else "a")
    with pytest.raises(UserError, match="generation of 1 of 4 samples failed; --max-failed-sample-fraction allows 0.2"):
        await make(config, pool, max_failed_sample_fraction=0.2).collect(0, None)
    await make(config, pool, max_failed_sample_fraction=0.25).collect(0, None)
    assert asyncio.all_tasks() == before


async def test_failed_rewards_are_counted_over_the_rollout(config):
    class Unlabelled(FakePrompts):
        def get_samples(self, num_groups):
            groups = super().get_samples(num_groups)
            for group in groups:
                if group[0].group_index == 0:
                    group[0].label = None
            return groups

    with pytest.raises(UserError, match="reward failed for 1 of [24] samples"):
        await make(config, FakePool(), prompts=Unlabelled(SIZE), max_reward_error_fraction=0.2).collect(0, None)
    collector = make(config, FakePool(), prompts=Unlabelled(SIZE), max_reward_error_fraction=0.25)
    collected = await collector.collect(0, None)
    assert collected.metrics["rollout/reward_error_ratio"] == 0.25
    assert (await collector.collect(1, None)).metrics["rollout/reward_error_ratio"] == 0


async def test_stale_groups_are_asked_again(config):
    """A surplus group of version 1, and an unfinished one with tokens of it."""
    pool = FakePool(lambda sample: None if sample.group_index == 3 else "a")
    collector = make(config, pool, over_sampling_batch_size=4, partial_rollout=True, max_weight_staleness=1)
    first = await collector.collect(0, 1)
    assert numbers(first.groups) == [0, 1] and waiting(collector) == ([2], [3])
    pool.plan, pool.version = lambda sample: "a", "3"
    second = await collector.collect(1, 3)
    assert numbers(second.groups) == [2, 3]
    assert [sample.weight_versions for group in second.groups for sample in group] == [["3"]] * 4
    assert counts(second) == {"new": 2, "from_buffer": 4, "stale": 2, "trained": 2, "surplus": 2}


async def test_groups_within_the_limit_are_not_stale(config):
    pool = FakePool(lambda sample: "a")
    collector = make(config, pool, over_sampling_batch_size=3, max_weight_staleness=2)
    await collector.collect(0, 1)
    asked = len(pool.requests)
    assert numbers((await collector.collect(1, 3)).groups) == [2, 3]
    assert members(2) not in pool.requests[asked:]


async def test_a_buffer_filter_chooses(config):
    """It takes the newest, and throws one away."""
    seen = []

    def newest(config, rollout_id, buffer, num_groups):
        seen.append((rollout_id, numbers(buffer), num_groups))
        if len(buffer) == 3:
            del buffer[1]
        return [buffer.pop()] if buffer else []

    pool = FakePool(lambda sample: None if sample.group_index in (0, 1, 2) else "a")
    collector = make(
        config, pool, Hooks(take_from_buffer=buffer_filter(newest)), over_sampling_batch_size=5, partial_rollout=True
    )
    await collector.collect(0, None)
    assert waiting(collector) == ([], [0, 1, 2])
    pool.plan = lambda sample: "a"
    collected = await collector.collect(1, None)
    assert seen[0] == (1, [0, 1, 2], 5) and seen[1] == (1, [0], 4)
    assert pool.requests[5:7] == [members(2), members(0)]
    assert counts(collected)["filtered"] == 1 and numbers(collected.all_groups) == [0, 2]


async def test_cancelled_it_leaves_no_task_and_no_group_behind(config):
    before, pool = asyncio.all_tasks(), FakePool(lambda sample: None)
    collector = make(config, pool, over_sampling_batch_size=4, max_weight_staleness=0)
    task = asyncio.create_task(collector.collect(0, 1))
    await settle()
    pool.finish(*members(2))
    await settle()
    assert waiting(collector) == ([2], [0, 1, 3])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == before
    assert waiting(collector) == ([2], [0, 1, 3])
    pool.plan, pool.version = lambda sample: "a", "2"
    collected = await collector.collect(0, 2)
    assert numbers(collected.groups) == [0, 1], "what had been kept is too old by now"
    assert counts(collected)["stale"] == 1


async def test_cancelled_while_the_engines_are_told_to_stop(config):
    class Stuck(FakePool):
        async def hold(self):
            await super().hold()
            await asyncio.Event().wait()

    pool = Stuck(lambda sample: None)
    collector = make(config, pool, over_sampling_batch_size=4)
    task = asyncio.create_task(collector.collect(0, None))
    await settle()
    pool.finish(*members(0, 1, 2))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert waiting(collector) == ([0, 1, 2], [3]), "in their order"
    await asyncio.wait_for(pool.wait_released(), 1)


async def test_an_error_in_one_group_ends_all(config):
    before = asyncio.all_tasks()
    pool = FakePool(lambda sample: ZeroDivisionError("bug") if sample.group_index == 1 else None)
    collector = make(config, pool)
    with pytest.raises(ZeroDivisionError):
        await collector.collect(0, None)
    assert asyncio.all_tasks() == before and waiting(collector) == ([], [0, 1])


async def test_a_saved_state_goes_on(config):
    pool = FakePool(lambda sample: None if sample.group_index == 1 else "a")
    changes = {"over_sampling_batch_size": 4, "partial_rollout": True}
    collector = make(config, pool, **changes)
    await collector.collect(0, None)
    snapshot = collector.state_dict()
    state = json.loads(json.dumps(snapshot))
    pool.plan = lambda sample: "a"
    await collector.collect(1, None)
    assert snapshot == state, "later changes don't show in it"

    other = make(config, pool, prompts=FakePrompts(SIZE, group_index=4), **changes)
    other.load_state_dict(state)
    assert waiting(other) == ([3], [1])
    collected = await other.collect(1, None)
    assert numbers(collected.groups) == [1, 3]
    assert collected.groups[0][0].response == ".a"
    with pytest.raises(ValueError, match="groups of 2 samples .* --n-samples-per-prompt is 3"):
        make(config, pool, n_samples_per_prompt=3).load_state_dict(state)


async def test_a_data_source_that_repeats_itself_is_refused(config):
    class Same(FakePrompts):
        def get_samples(self, num_groups):
            self.group_index = 0
            return super().get_samples(num_groups)

    pool = FakePool(lambda sample: None if sample.group_index == 0 else "b")
    collector = make(config, pool, Hooks(keep_group=dynamic_filter(check_reward_nonzero_std)), prompts=Same(SIZE))
    with pytest.raises(ValueError, match="handed out group_index 0 twice"):
        await collector.collect(0, None)
