"""An event loop in a thread, so that engines are talked to while this thread gathers."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any

from miles.utils.tasks import all_to_their_end


class BackgroundLoop:
    """A context manager; within it coroutines run in an event loop of their own thread."""

    def __enter__(self) -> "BackgroundLoop":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight sync", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, action: Coroutine[Any, Any, Any]) -> Future:
        """Start `action`; returns its future result."""
        return asyncio.run_coroutine_threadsafe(action, self._loop)

    def run(self, actions: Iterable[Awaitable[Any]]) -> list[Any]:
        """Run all actions side by side to their end; raise the first failure, or return their results."""
        return self.start(all_to_their_end(list(actions))).result()
