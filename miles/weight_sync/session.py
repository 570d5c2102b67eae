"""One update of one engine, around any transport: pause, flush, send, check the count, set the version, continue."""

import logging
from collections.abc import Awaitable, Iterable

from miles.engines.client import SGLangClient, SGLangError

logger = logging.getLogger(__name__)

# Of a flush beside requests that may go on: what was aborted ends with the step that runs.
FLUSH_SECONDS = 1.0


async def delivery(url: str, names: list[str], sending: Awaitable[None]) -> None:
    """Await `sending` of the tensors `names` to the engine at `url`.

    Raises:
        RuntimeError: it fails; with engine and names.
    """
    try:
        await sending
    except SGLangError as error:
        raise RuntimeError(
            f"{url} did not take a bucket of {len(names)} tensors, {names[0]} to {names[-1]}: {error}"
        ) from error


class UpdateSession:
    """Updates the weights of one engine: `open()`, `sent()` for each bucket, `finish()`; `release()` in every case.

    No request starts from `open()` to the end. After a failure an engine that is `touched` holds weights of two
    versions: it keeps the old version and stays paused, until another update of it succeeds.

    Args:
        client: of the engine.
        names: every tensor that must be sent.
        version: what the engine reports once they were.
        flush_cache: empty the engine's cache; False where its memory is away, in which case it was emptied before that.
        pause_mode: what becomes of running requests (--pause-generation-mode). Only `abort` ends them, after which the
            cache can always be emptied; with the others it is emptied where none was running.

    Attributes:
        touched: set it once the engine's weights may have changed.
    """

    def __init__(self, client: SGLangClient, names: Iterable[str], version: int, flush_cache: bool, pause_mode: str):
        self.client = client
        self.version = version
        self.flush_cache = flush_cache
        self.pause_mode = pause_mode
        self._missing = dict.fromkeys(names)
        self.touched = False
        self._paused = False

    async def open(self) -> None:
        """Empty the engine's cache, with flush_cache, and pause it."""
        if self.flush_cache and self.pause_mode != "abort":
            # Before the pause, after which a batch that has ended still counts as running.
            await self._flush_unless_in_use()
        # Set first: a pause that failed midway may have happened.
        self._paused = True
        await self.client.pause(self.pause_mode)
        if self.flush_cache and self.pause_mode == "abort":
            await self.client.flush_cache()

    async def _flush_unless_in_use(self) -> None:
        """Empty the cache. Where requests go on SGLang refuses, and dies where an update is told to."""
        try:
            # Tried whatever it reports as running: that is late, and skipped flushes after an abort of all.
            await self.client.flush_cache(FLUSH_SECONDS)
        except SGLangError as error:
            if error.status != 400:
                raise
            logger.warning(
                "%s goes on with %d requests after the update (--pause-generation-mode %s): cached prefixes that they "
                "share were computed with the old weights",
                self.client.url,
                await self.client.running_requests(),
                self.pause_mode,
            )

    def sent(self, names: Iterable[str]) -> None:
        """Note that the engine has taken these tensors.

        Raises:
            RuntimeError: one of them was not to be sent, or was sent before.
        """
        for name in names:
            if name not in self._missing:
                raise RuntimeError(f"{name} was sent to {self.client.url} twice or is not of this model")
            del self._missing[name]

    async def finish(self) -> None:
        """Set the version and let the engine go on.

        Raises:
            RuntimeError: tensors were not sent.
        """
        if self._missing:
            names = list(self._missing)
            raise RuntimeError(f"{len(names)} tensors were not sent to {self.client.url}: {', '.join(names[:8])} ...")
        await self.client.update_weight_version(str(self.version))
        await self.client.continue_()
        self._paused = False

    async def release(self) -> None:
        """Let a paused engine that is whole go on, and close the connections. Never raises for one that is gone."""
        if self._paused and self.touched:
            logger.warning(
                "%s holds weights of two versions and stays paused until an update of it succeeds", self.client.url
            )
        elif self._paused:
            self._paused = False
            try:
                await self.client.continue_()
            except SGLangError as error:
                logger.warning("an engine whose update failed could not be continued: %s", error)
        await self.client.close()
