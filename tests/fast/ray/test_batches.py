"""When each batch is begun and awaited; the order among all other calls is in tests/fast/test_order.py."""

import asyncio
from contextlib import contextmanager

import pytest

from miles.config import RunConfig
from miles.ray.batches import Batches


class Rollout:
    """Generates when it is told to: `finish[rollout_id]`."""

    def __init__(self):
        self.begun, self.finish = [], {}

    def generate(self, rollout_id):
        self.begun.append(rollout_id)
        self.finish[rollout_id] = asyncio.get_running_loop().create_future()
        return self.finish[rollout_id]


class Waits:
    """The report's timer: which phases are running, and how often each began."""

    def __init__(self):
        self.running, self.phases = None, []

    @contextmanager
    def timer(self, phase):
        assert self.running is None
        self.running = phase
        self.phases.append(phase)
        yield
        self.running = None


def batches_of(num_rollout=3, **schedule):
    config = RunConfig.model_construct(**(RunConfig.model_construct(num_rollout=num_rollout).model_dump() | schedule))
    rollout, report = Rollout(), Waits()
    return Batches(config, rollout, report), rollout, report


async def soon(awaitable):
    """A task that has come as far as it can."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_in_turns_nothing_is_begun_before_it_is_asked_for():
    batches, rollout, report = batches_of()
    for rollout_id in range(3):
        asked = await soon(batches.next(rollout_id))
        assert rollout.begun == list(range(rollout_id + 1)) and not asked.done()
        rollout.finish[rollout_id].set_result(f"batch {rollout_id}")
        assert await asked == f"batch {rollout_id}"
        await batches.settle()
    assert report.phases == []  # it is the generation that takes time


async def test_one_step_ahead_the_next_is_begun_with_the_last_and_settled_before_new_weights():
    batches, rollout, report = batches_of(one_step_ahead=True)
    first = await soon(batches.next(0))
    assert rollout.begun == [0] and report.running == "wait"
    rollout.finish[0].set_result("batch 0")
    assert await first == "batch 0" and rollout.begun == [0, 1] and report.running is None

    settled = await soon(batches.settle())
    assert not settled.done() and report.running == "wait"
    rollout.finish[1].set_result("batch 1")
    await settled
    # It was made with the weights of before, and is there at once; the one after it sees the new ones.
    assert rollout.begun == [0, 1]
    assert await batches.next(1) == "batch 1" and rollout.begun == [0, 1, 2]
    rollout.finish[2].set_result("batch 2")
    assert await batches.next(2) == "batch 2"
    await batches.settle()
    assert rollout.begun == [0, 1, 2] and report.phases == ["wait"] * 4


async def test_fully_asynchronous_batches_are_taken_when_they_are_asked_for():
    batches, rollout, report = batches_of(fully_async=True)
    for rollout_id in range(2):
        asked = await soon(batches.next(rollout_id))
        assert report.running == "wait"
        rollout.finish[rollout_id].set_result(rollout_id)
        assert await asked == rollout_id
        await batches.settle()
    assert rollout.begun == [0, 1] and report.phases == ["wait"] * 2


async def test_what_fails_ahead_is_raised_where_it_is_awaited():
    batches, rollout, _ = batches_of(one_step_ahead=True)
    first = await soon(batches.next(0))
    rollout.finish[0].set_result("batch 0")
    await first
    rollout.finish[1].set_exception(RuntimeError("no engine is left"))
    with pytest.raises(RuntimeError, match="no engine is left"):
        await batches.settle()
