"""Which engines stand still: each is asked, all the time, something that its scheduler has to answer."""

import asyncio
import logging
from collections.abc import Mapping

from miles.config import RunConfig
from miles.engines.client import SGLangClient, SGLangError

logger = logging.getLogger(__name__)

# The loop may have been busy elsewhere all the while: what has come meanwhile is read first.
READ_SECONDS = 1.0


class Health:
    """Asks each engine for its state, every --rollout-health-check-interval seconds, one question at a time.

    The question is `/server_info`, which the scheduler answers between two steps, also while it is paused or its memory
    is away. (SGLang's /health generates a token or does not reach the scheduler, and /v1/loads shows what the scheduler
    wrote down last.) An engine that loads a checkpoint or compiles a kernel does not answer either: nothing is ended.

    Args:
        config: the run's configuration.
        engines: what messages call each engine, by its client.
    """

    def __init__(self, config: RunConfig, engines: Mapping[SGLangClient, str]) -> None:
        self._engines = engines
        self._first_wait = config.rollout_health_check_first_wait
        self._interval = config.rollout_health_check_interval
        self._timeout = config.rollout_health_check_timeout
        self._silent_since: dict[SGLangClient, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Ask from now on, in this event loop."""
        self._tasks = [asyncio.create_task(self._watch(client)) for client in self._engines]

    async def stop(self) -> None:
        """Ask no more; a second call does nothing."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self._tasks = []

    def standing_still(self) -> dict[SGLangClient, str]:
        """The engines that have not answered within --rollout-health-check-timeout, and what is known of it."""
        now = asyncio.get_running_loop().time()
        return {
            client: f"has not answered its health check for {now - since:.0f} s (--rollout-health-check-timeout "
            f"{self._timeout:g})"
            for client, since in self._silent_since.items()
        }

    async def _watch(self, client: SGLangClient) -> None:
        await asyncio.sleep(self._first_wait)
        while True:
            await self._ask(client)
            await asyncio.sleep(self._interval)

    async def _ask(self, client: SGLangClient) -> None:
        asked = asyncio.get_running_loop().time()
        question = asyncio.create_task(client.server_info())
        try:
            for seconds in (self._timeout, READ_SECONDS):
                await asyncio.wait({question}, timeout=seconds)
            if not question.done() and client not in self._silent_since:
                self._silent_since[client] = asked
                logger.error("%s %s", self._engines[client], self.standing_still()[client])
            await question
        except SGLangError as error:
            if error.status is None:
                return  # whether it has ended is seen elsewhere
        finally:
            question.cancel()
        if (since := self._silent_since.pop(client, None)) is not None:
            logger.warning(
                "%s answers again, after %.0f s", self._engines[client], asyncio.get_running_loop().time() - since
            )
