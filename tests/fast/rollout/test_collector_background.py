"""Generation all the time."""

import asyncio

import pytest

from miles.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from miles.rollout.hooks import Hooks
from miles.rollout.user_functions import dynamic_filter
from miles.utils.errors import UserError
from tests.fast.rollout.collecting import SIZE, counts, make, members, numbers, small_rollouts, waiting
from tests.fast.rollout.fake_pool import FakePool, FakePrompts, settle


@pytest.fixture
def config(engine_config):
    return small_rollouts(engine_config)


@pytest.fixture
async def background(config):
    """A function that makes a collector and starts it; it is stopped in the end, and leaves no task."""
    before, started = asyncio.all_tasks(), []

    def start(pool, hooks=None, prompts=None, state=None, **changes):
        collector = make(config, pool, hooks, prompts, fully_async=True, **changes)
        if state is not None:
            collector.load_state_dict(state)
        collector.start()
        started.append(collector)
        return collector

    yield start
    for collector in started:
        await collector.stop()
    assert asyncio.all_tasks() - before == {asyncio.current_task()}


async def test_background_is_bounded(background):
    """Two groups at once, and four finished ones in all."""
    pool = FakePool(lambda sample: None)
    collector = background(pool)
    await settle()
    assert pool.waiting == members(0, 1)
    for group in (0, 1, 2, 3):
        pool.finish(*members(group))
        await settle()
    assert pool.waiting == [] and waiting(collector) == ([0, 1, 2, 3], [])
    first = await collector.take(0, None)
    assert numbers(first.groups) == [0, 1] and counts(first)["trained"] == 2
    await settle()
    assert pool.waiting == members(4, 5)
    second = await collector.take(1, None)
    assert numbers(second.groups) == [2, 3] and counts(second) == {
        "new": 2,
        "from_buffer": 2,
        "trained": 2,
        "in_flight": 2,
    }


async def test_background_takes_in_the_order_of_finishing(background):
    pool = FakePool(lambda sample: None)
    collector = background(pool)
    task = asyncio.create_task(collector.take(0, None))
    await settle()
    pool.finish(*members(1))
    await settle()
    assert pool.waiting == members(0, 2) and not task.done()
    pool.finish(*members(2))
    assert numbers((await task).groups) == [1, 2]


async def test_background_pauses_for_an_evaluation(background):
    pool = FakePool(lambda sample: None)
    collector = background(pool)
    await settle()
    collector.pause()
    pool.finish(*members(0))
    await settle()
    assert pool.waiting == members(1), "what is in flight goes on, nothing new is asked"
    collector.resume()
    await settle()
    assert pool.waiting == members(1, 2)


@pytest.mark.parametrize("partial", [True, False])
async def test_background_and_a_weight_sync(background, partial):
    pool = FakePool(lambda sample: None)
    collector = background(pool, partial_rollout=partial)
    await settle()
    await pool.hold()
    await settle()
    assert waiting(collector) == ([], [0, 1])
    tokens = [sample["tokens"] for group in collector.state_dict()["unfinished"] for sample in group]
    assert tokens == [[1, 2, 1000] if partial else [1, 2]] * 4, "what they have can be saved"
    pool.version, pool.plan = "2", lambda sample: "a"
    pool.release()
    collected = await collector.take(0, 2)
    versions = [sample.weight_versions for group in collected.groups for sample in group]
    assert versions == [["1", "2"] if partial else ["2"]] * 4


@pytest.mark.parametrize("handler", ["retry", "drop"])
async def test_background_and_stale_groups(background, handler):
    pool = FakePool(lambda sample: None)
    collector = background(pool, max_weight_staleness=1, async_unused_samples_handler=handler)
    await settle()
    pool.finish(*members(0))
    await settle()
    pool.version = "3"
    pool.plan = lambda sample: "a"
    pool.finish(*members(1, 2))
    collected = await collector.take(0, 3)
    assert numbers(collected.groups) == [1, 2]
    assert counts(collected)["stale" if handler == "retry" else "dropped"] == 1
    assert numbers(collected.all_groups) == ([1, 2] if handler == "retry" else [0, 1, 2])
    await settle()
    assert pool.requests.count(members(0)) == (2 if handler == "retry" else 1)


async def test_background_with_a_buffer_full_of_stale_groups(background):
    pool = FakePool()
    collector = background(pool, max_weight_staleness=1)
    await settle()
    assert waiting(collector) == ([0, 1, 2, 3], [])
    pool.version = "3"
    collected = await asyncio.wait_for(collector.take(0, 3), 5)
    assert numbers(collected.groups) == [0, 1] and counts(collected)["stale"] == 4
    assert all(sample.weight_versions == ["3"] for group in collected.groups for sample in group)


async def test_background_drops_what_became_stale_unfinished(background, config):
    """Of two loaded groups one is gone on with before anything is known of versions; the hook sees finished ones."""
    pool = FakePool(lambda sample: None)
    before = make(config, pool, partial_rollout=True)
    task = asyncio.create_task(before.collect(0, None))
    await settle()
    await pool.hold()
    pool.release()
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    changes = {"max_weight_staleness": 1, "async_unused_samples_handler": "drop", "async_max_concurrent_samples": 2}
    collector = background(
        pool, state=before.state_dict(), prompts=FakePrompts(SIZE, 2), partial_rollout=True, **changes
    )
    await settle()
    assert pool.waiting == members(0)
    task = asyncio.create_task(collector.take(0, 5))
    await settle()
    pool.version, pool.plan = "5", lambda sample: "a"
    pool.finish(*members(0))
    collected = await task
    assert numbers(collected.groups) == [2, 3] and counts(collected)["dropped"] == 2
    assert numbers(collected.all_groups) == [0, 2, 3]


async def test_background_errors_come_out(background, caplog):
    pool = FakePool(lambda sample: ZeroDivisionError("bug") if sample.group_index == 2 else "a")
    collector = background(pool)
    await settle()
    with pytest.raises(ZeroDivisionError):
        await collector.take(0, None)
    with pytest.raises(ZeroDivisionError):
        await collector.take(0, None)
    waited = background(FakePool(lambda sample: None if sample.group_index else ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError):
        await waited.take(0, None)
    await waited.stop()
    assert "generation had failed in the background" in caplog.text


async def test_background_that_keeps_nothing_ends_the_run(background):
    collector = background(
        FakePool(), Hooks(keep_group=dynamic_filter(check_reward_nonzero_std)), dynamic_sampling_max_batches=2
    )
    with pytest.raises(UserError, match=r"tried 4 groups .* has 0 of the 2"):
        await collector.take(0, None)


async def test_stopped_it_keeps_what_was_in_flight(background):
    pool = FakePool(lambda sample: None)
    collector = background(pool)
    await settle()
    pool.finish(*members(1))
    await settle()
    await collector.stop()
    assert waiting(collector) == ([1], [0, 2])


async def test_waiting_costs_nothing(background):
    """No busy loop between the one that waits for a rollout and the one that makes it."""
    pool = FakePool(lambda sample: None)
    collector = background(pool)
    task = asyncio.create_task(collector.take(0, None))
    await settle()
    loop, steps = asyncio.get_running_loop(), 0
    call_soon = loop.call_soon

    def counting(*arguments, **keywords):
        nonlocal steps
        steps += 1
        return call_soon(*arguments, **keywords)

    loop.call_soon = counting
    await settle()
    loop.call_soon = call_soon
    assert steps < 50 and not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
