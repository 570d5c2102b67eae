"""Things awaited side by side, of which none is left running."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any


async def all_of[T](work: Sequence[Awaitable[T]]) -> list[T]:
    """Await all side by side; the first error ends the others, and nothing is left running.

    Returns:
        The results, in the order of `work`.

    Raises:
        Exception: the first that was raised.
    """
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(*tasks)


async def all_to_their_end[T](work: Sequence[Awaitable[T]]) -> list[T]:
    """Await all side by side, each to its end.

    Returns:
        The results, in the order of `work`.

    Raises:
        Exception: the first in that order, once all have ended; the others are its notes.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        for failure in failures[1:]:
            failures[0].add_note(f"also failed: {failure}")
        raise failures[0]
    return [result for result in results if not isinstance(result, BaseException)]


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel the tasks that still run, and wait until none does."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
