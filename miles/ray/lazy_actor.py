"""Actors whose class is imported only in their own process: the driver needs neither torch nor Megatron.

Ray wants the class of an actor at hand; importing trainer and rollout manager would cost the driver ten seconds and
half a gigabyte. Their classes are named by path instead, and `ActorClient` makes calling them look the same.
"""

import functools
import importlib
import inspect
import os
from typing import Any

import ray

from miles.utils.logs import configure_logging


class _Host:
    """Holds an object of the class at `path` ("package.module.Class").

    It works in the driver's working directory where its machine has that, so that a relative path in a user's file or
    function is what it is for the driver.

    An error of the object's constructor is raised by every call: from here Ray would report it as the death of the
    actor, and it would be lost in a traceback.
    """

    def __init__(self, path: str, working_directory: str, *args: Any):
        if os.path.isdir(working_directory):
            os.chdir(working_directory)
        module, self._name = path.rsplit(".", 1)
        self._refusal: Exception | None = None
        configure_logging()
        try:
            self._object = getattr(importlib.import_module(module), self._name)(*args)
        except Exception as error:
            self._refusal = error

    def __repr__(self) -> str:
        """Ray puts it before each line that the actor prints."""
        return self._name

    def call(self, method: str, *args: Any) -> Any:
        if self._refusal is not None:
            raise self._refusal
        return getattr(self._object, method)(*args)


class _AsyncHost(_Host):
    """The same for a class with coroutines: many calls run side by side in one event loop."""

    async def call(self, method: str, *args: Any) -> Any:
        result = super().call(method, *args)
        return await result if inspect.isawaitable(result) else result


class ActorClient:
    """Starts an actor and calls it: `await client.method(...)` runs there, object references resolved to their values.

    Args:
        path: "package.module.Class" of the object that the actor holds.
        args: its constructor's arguments.
        options: Ray's actor options.
        concurrent: the class has coroutine methods, which run side by side.
    """

    def __init__(self, path: str, *args: Any, options: dict[str, Any], concurrent: bool = False):
        host = _AsyncHost if concurrent else _Host
        self._actor = ray.remote(host).options(**options).remote(path, os.getcwd(), *args)

    def kill(self) -> None:
        """End the actor's process at once, whatever it does; calls that it has not answered raise."""
        ray.kill(self._actor)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):  # what pickle and copy look for
            raise AttributeError(method)
        return functools.partial(self._actor.call.remote, method)
