"""Calls of functions of the user's own: whatever they raise is an error that names them, and ends nothing else."""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from miles.utils.errors import UserError


class FunctionFailed(RuntimeError):
    """A function of the user's own failed. The text has its flag and path; `__cause__` is what it raised."""


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Around a call of foreign code, `name` its flag and path: what it raises is the cause of a FunctionFailed.

    So are SystemExit and KeyboardInterrupt, which would end the whole event loop without a word, and a CancelledError
    of a task that nobody cancelled. What names a function already, and a sentence of Miles for users, goes through.
    """
    try:
        yield
    except (FunctionFailed, UserError, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise FunctionFailed(f"{name} failed: it was cancelled from within") from error
    # Foreign code raises anything, and a ValueError of its own is no message of Miles about a flag.
    except BaseException as error:
        raise FunctionFailed(f"{name} failed: {_described(error)}") from error


def described(error: BaseException) -> str:
    """An error in a line, for a list of failures."""
    return str(error) if isinstance(error, FunctionFailed | UserError) else _described(error)


def guarded(
    name: str, function: Callable[..., Any], *, in_thread: bool = False, limit_s: float | None = None
) -> Callable[..., Any]:
    """`function`, whose calls raise what `named_errors` lets through and nothing else.

    Args:
        name: its flag and path.
        in_thread: it may be a plain function, and is to be awaited all the same: each call has a thread of its own.
        limit_s: seconds that a call may take, where it is awaited. A thread can't be ended: it is left to itself.
    """

    def call(*arguments: Any, **keywords: Any) -> Any:
        with named_errors(name):
            return function(*arguments, **keywords)

    async def wait(*arguments: Any, **keywords: Any) -> Any:
        with named_errors(name):
            try:
                async with asyncio.timeout(limit_s) as limit:
                    if inspect.iscoroutinefunction(function):
                        return await function(*arguments, **keywords)
                    result = await _own_thread(name, functools.partial(call, *arguments, **keywords))
                    # A decorated async function need not look like one.
                    return await result if inspect.isawaitable(result) else result
            except TimeoutError as error:
                if limit.expired():
                    raise FunctionFailed(f"{name} failed: it was not done within {limit_s:g} s") from error
                raise

    waits = in_thread or inspect.iscoroutinefunction(function)
    return functools.wraps(function)(wait if waits else call)


async def _own_thread(name: str, call: Callable[[], Any]) -> Any:
    """The result of `call`, from a thread that the end of the process does not wait for: it may hang."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # it came too late
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(call)
        except (FunctionFailed, UserError) as failure:
            error = failure
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return await future


def _is_cancelled() -> bool:
    """Whether somebody asked the current task to end."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # there is no event loop here
        return False
    return task is not None and task.cancelling() > 0


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
