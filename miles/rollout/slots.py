"""Which server takes the next request, and how many it has in flight."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from miles.backends.sglang_utils.client import SGLangClient


class Slots:
    """Shares out servers, the least loaded first, at most `limit` samples each.

    A request larger than the limit waits for an idle server and has it alone.

    Args:
        clients: one a server.
        limit: samples in flight at most, of each.
    """

    def __init__(self, clients: Sequence[SGLangClient], limit: int) -> None:
        self._clients = clients
        self._limit = limit
        self._load = [0] * len(clients)
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[SGLangClient]:
        """A server for `count` samples, once one has room for them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._fits(count))
            server = self._least_loaded()
            self._load[server] += count
        try:
            yield self._clients[server]
        finally:
            self._load[server] -= count
            async with self._changed:
                self._changed.notify_all()

    def _least_loaded(self) -> int:
        return min(range(len(self._load)), key=self._load.__getitem__)

    def _fits(self, count: int) -> bool:
        load = self._load[self._least_loaded()]
        return load == 0 or load + count <= self._limit
