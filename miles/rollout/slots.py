"""Which server takes the next request, and how many samples it has in flight."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from miles.engines.client import SGLangClient

SHUN_SECONDS = 3.0


class NoServerLeft(RuntimeError):
    """No server gives an answer; the message says why."""


class Slots:
    """Shares out servers, the least loaded first, at most `limit` samples each; requests are served in order.

    A request larger than the limit waits for an idle server and has it alone. A server that fails its requests at once
    would always be the least loaded: `shun` keeps it from more while there are others, but for one every 3 seconds.

    Args:
        clients: one a server.
        limit: samples in flight at most, of each.
    """

    def __init__(self, clients: Sequence[SGLangClient], limit: int) -> None:
        self._limit = limit
        self._load = dict.fromkeys(clients, 0)
        self._out: set[SGLangClient] = set()
        self._waiting: deque[tuple[int, Collection[SGLangClient], asyncio.Future[SGLangClient]]] = deque()
        self._shunned: dict[SGLangClient, float] = {}  # until when
        self._epitaph = ""

    def __contains__(self, client: SGLangClient) -> bool:
        return client in self._load and client not in self._out

    @asynccontextmanager
    async def take(self, count: int, avoid: Collection[SGLangClient] = ()) -> AsyncIterator[SGLangClient]:
        """A server for `count` samples, once one has room for them: none of `avoid` if there is another.

        Raises:
            NoServerLeft: all are out.
        """
        client = await self._acquire(count, avoid)
        try:
            yield client
        finally:
            self._give_back(client, count)

    def others(self, avoid: Collection[SGLangClient]) -> bool:
        """Whether there are servers besides those of `avoid`."""
        return any(client not in avoid for client in self._in_use())

    def shun(self, client: SGLangClient) -> None:
        """It failed a request: send others elsewhere until `trust`."""
        self._shunned[client] = asyncio.get_running_loop().time() + SHUN_SECONDS

    def trust(self, client: SGLangClient) -> None:
        """It answered a request."""
        self._shunned.pop(client, None)

    def remove(self, client: SGLangClient, reason: str) -> None:
        """Give `client` no more requests. `reason` is the message of NoServerLeft if it was the last one."""
        self._out.add(client)
        self._epitaph = reason
        self._serve()

    def take_back(self, client: SGLangClient) -> None:
        """End `remove`. What it still has in flight from before counts."""
        self._out.discard(client)
        self._serve()

    def _in_use(self) -> list[SGLangClient]:
        return [client for client in self._load if client not in self._out]

    async def _acquire(self, count: int, avoid: Collection[SGLangClient]) -> SGLangClient:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((count, avoid, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result(), count)
            self._serve()  # those behind it may fit
            raise

    def _give_back(self, client: SGLangClient, count: int) -> None:
        self._load[client] -= count
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, avoid, future = self._waiting[0]
            if not future.done():
                if not self._in_use():
                    future.set_exception(NoServerLeft(self._epitaph))
                else:
                    client = self._choose(avoid)
                    if self._load[client] and self._load[client] + count > self._limit:
                        return
                    self._load[client] += count
                    if client in self._shunned:
                        self.shun(client)  # let this one try it
                    future.set_result(client)
            self._waiting.popleft()

    def _choose(self, avoid: Collection[SGLangClient]) -> SGLangClient:
        in_use = self._in_use()
        allowed = [client for client in in_use if client not in avoid] or in_use
        if self._shunned:
            now = asyncio.get_running_loop().time()
            allowed = [client for client in allowed if self._shunned.get(client, now) <= now] or allowed
        return min(allowed, key=self._load.__getitem__)
