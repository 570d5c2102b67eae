import asyncio

import pytest

from miles.utils.tasks import all_of, all_to_their_end


async def test_results_are_in_the_order_of_the_work():
    first = asyncio.Event()

    async def waits():
        await first.wait()
        return 1

    async def goes_ahead():
        first.set()
        return 2

    assert await all_of([waits(), goes_ahead()]) == [1, 2]
    assert await all_of([waits()]) == [1] and await all_of([]) == []


@pytest.mark.parametrize("others", [0, 2])
async def test_the_first_error_ends_the_others_before_it_is_raised(others):
    ended = []

    async def hangs():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # an end takes time
            ended.append(None)

    async def fails():
        raise RuntimeError("no")

    before = asyncio.all_tasks()
    with pytest.raises(RuntimeError, match="^no$"):
        await all_of([*(hangs() for _ in range(others)), fails()])
    assert len(ended) == others and asyncio.all_tasks() == before


async def test_whoever_is_cancelled_leaves_nothing_running():
    started, ended = asyncio.Event(), []

    async def hangs():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(None)

    before = asyncio.all_tasks()
    waiting = asyncio.create_task(all_of([hangs(), hangs()]))
    await started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(ended) == 2 and asyncio.all_tasks() == before


async def test_an_error_waits_for_the_others_where_each_goes_to_its_end():
    ended = []

    async def fails():
        raise RuntimeError("no")

    async def takes_longer():
        await asyncio.sleep(0)
        ended.append(None)
        return 1

    with pytest.raises(RuntimeError) as error:
        await all_to_their_end([fails(), takes_longer(), fails()])
    assert len(ended) == 1 and str(error.value) == "no" and error.value.__notes__ == ["also failed: no"]
    assert await all_to_their_end([takes_longer()]) == [1]
