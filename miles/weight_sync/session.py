"""One update of one engine, around any transport: pause, flush, send, check the count, set the version, continue."""

import logging
from collections.abc import Awaitable, Iterable

from miles.backends.sglang_utils.client import SGLangClient, SGLangError

logger = logging.getLogger(__name__)


class UpdateSession:
    """Updates the weights of one engine: `open()`, `send()` for each bucket, `finish()`; `release()` in every case.

    Requests still running are aborted by the pause: none should be. The cache is flushed once they are gone, so nothing
    computed with the old weights is left, and none start until the session ends. After a failure the engine holds
    weights of two versions: its version stays the old one, and the error must end the run or start the update anew.

    names: every tensor that must be sent. version: what the engine reports once they were. flush_cache: empty the
    engine's cache; False where its memory is away, in which case it was emptied before that.
    """

    def __init__(self, client: SGLangClient, names: Iterable[str], version: int, flush_cache: bool):
        self.client = client
        self.version = version
        self.flush_cache = flush_cache
        self._missing = dict.fromkeys(names)
        self._paused = False

    async def open(self) -> None:
        """Pause the engine and, with flush_cache, empty its cache."""
        # Set first: a pause that failed midway may have happened.
        self._paused = True
        await self.client.pause("abort")
        if self.flush_cache:
            await self.client.flush_cache()

    async def send(self, names: list[str], delivery: Awaitable[None]) -> None:
        """Await a transport's `delivery` of the tensors `names`. Raises RuntimeError with the bucket where it fails."""
        try:
            await delivery
        except SGLangError as error:
            raise RuntimeError(
                f"{self.client.url} did not take a bucket of {len(names)} tensors, {names[0]} to {names[-1]}: {error}"
            ) from error
        for name in names:
            if name not in self._missing:
                raise RuntimeError(f"{name} was sent to {self.client.url} twice or is not of this model")
            del self._missing[name]

    async def finish(self) -> None:
        """Set the version and let the engine go on. Raises RuntimeError where tensors were not sent."""
        if self._missing:
            names = list(self._missing)
            raise RuntimeError(f"{len(names)} tensors were not sent to {self.client.url}: {', '.join(names[:8])} ...")
        await self.client.update_weight_version(str(self.version))
        await self.client.continue_()
        self._paused = False

    async def release(self) -> None:
        """Let a paused engine go on, and close the connections. Never raises for an engine that is gone."""
        if self._paused:
            self._paused = False
            try:
                await self.client.continue_()
            except SGLangError as error:
                logger.warning("an engine whose update failed could not be continued: %s", error)
        await self.client.close()
