"""The servers of a run: their actors, which start and end them, and the clients that talk to them."""

import asyncio
import logging
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from miles.backends.sglang_utils.client import SGLangClient, SGLangError
from miles.backends.sglang_utils.router import RouterClient
from miles.config import RunConfig
from miles.rollout.engine_pool import EnginePool

logger = logging.getLogger(__name__)


class Engines:
    """All engines, and the router if there is one.

    Args:
        config: the run's configuration.
        engines: handles of `SGLangEngine` or `ExternalEngine` actors, not started; empty where the run needs none.
        router: handle of an `SGLangRouter` or `ExternalRouter` actor, not started, or None.

    Attributes:
        urls: of each engine's server, by engine rank, once they are started.
        clients: one an engine.
    """

    def __init__(self, config: RunConfig, engines: list[ActorHandle], router: ActorHandle | None) -> None:
        self._config = config
        self._engines = engines
        self._router = router
        self._router_client: RouterClient | None = None
        self.urls: list[str] = []
        self.clients: list[SGLangClient] = []

    async def start(self) -> None:
        """Start all engines, then the router, and wait until they are healthy; the first failure is raised."""
        config = self._config
        self.urls = await asyncio.gather(*(engine.start.remote() for engine in self._engines))
        router_url = None if self._router is None else await self._router.start.remote(self.urls)
        limits = {"request_timeout": config.rollout_request_timeout, "retries": config.rollout_request_retries}
        self.clients = [SGLangClient(url, **limits) for url in self.urls]
        if router_url is not None:
            self._router_client = RouterClient(router_url, **limits)

    def kill(self) -> None:
        """End all that Miles started, at once: a start failed, and others may still be starting."""
        for part in self._parts():
            ray.kill(part)  # a server ends with its actor

    async def check(self) -> None:
        """Raise, with the tail of its log, if an engine or the router has died."""
        await asyncio.gather(*(part.check.remote() for part in self._parts()))

    async def dead(self) -> dict[SGLangClient, BaseException]:
        """The clients of those that have died, with what `check` would say of each."""
        results = await asyncio.gather(*(part.check.remote() for part in self._parts()), return_exceptions=True)
        clients = [client for client in (*self.clients, self._router_client) if client is not None]
        return {
            client: result for client, result in zip(clients, results, strict=True) if isinstance(result, BaseException)
        }

    def pool(self, tokenizer: Any) -> EnginePool:
        """Where samples are generated: at each engine, or at the router, which chooses one."""
        limit = self._config.sglang_server_concurrency
        if self._router_client is None:
            return EnginePool(self._config, self.clients, limit, tokenizer, self.dead)
        # The router takes no aborts.
        limit *= len(self.clients)
        return EnginePool(self._config, [self._router_client], limit, tokenizer, self.dead, engines=self.clients)

    async def version(self) -> int | None:
        """Of the weights of the engines that answer; None before the first sync, and without engines."""
        for client in self.clients:
            try:
                version = (await client.model_info())["weight_version"]
            except SGLangError:
                continue  # what a dead engine means is the pool's to say
            return int(version) if version.isdecimal() else None
        return None

    async def close(self) -> None:
        """Close connections and end the servers that Miles started. A second call does nothing."""
        for client in (*self.clients, self._router_client):
            if client is not None:
                await client.close()
        results = await asyncio.gather(*(part.shutdown.remote() for part in self._parts()), return_exceptions=True)
        for result in results:
            if isinstance(result, RayActorError):  # its node is gone, perhaps, and the run went on with the others
                logger.warning("a server could not be shut down: %s", result)
            elif isinstance(result, BaseException):
                raise result

    def _parts(self) -> list[ActorHandle]:
        return self._engines if self._router is None else [*self._engines, self._router]
