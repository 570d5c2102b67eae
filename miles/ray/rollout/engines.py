"""The servers of a run: their actors, which start and end them, and the clients that talk to them."""

import asyncio
import logging
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from miles.backends.sglang_utils.router import RouterClient
from miles.config import RunConfig
from miles.engines.client import SGLangClient, SGLangError
from miles.ray.rollout.health import Health
from miles.rollout.engine_pool import END_POLL_SECONDS, END_SECONDS, EnginePool

logger = logging.getLogger(__name__)

# A server that answers later than this is judged by its health, not by what it would have said.
ANSWER_SECONDS = 3.0


class ServersEnded(RuntimeError):
    """Servers of the run have ended. The message says which, how, and what they wrote last."""


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
        self._health = Health(config, {})
        # By the number of a server's actor: the last question to it, which it may still have to answer.
        self._checks: dict[int, asyncio.Future[None]] = {}
        self._out: set[SGLangClient] = set()
        self._version: str | None = None
        self.urls: list[str] = []
        self.clients: list[SGLangClient] = []

    async def start(self) -> None:
        """Start all engines, then the router, and wait until they are healthy; the first failure is raised."""
        config = self._config
        self.urls = await asyncio.gather(*(engine.start.remote() for engine in self._engines))
        router_url = None if self._router is None else await self._router.start.remote(self.urls)
        limits: Any = {"request_timeout": config.rollout_request_timeout, "retries": config.rollout_request_retries}
        self.clients = [SGLangClient(url, **limits) for url in self.urls]
        if router_url is not None:
            self._router_client = RouterClient(router_url, **limits)
        names = self._names()
        self._health = Health(config, {client: names[client] for client in self.clients})
        self._health.start()

    def kill(self) -> None:
        """End all that Miles started, at once: a start failed, and others may still be starting."""
        for part in self._parts():
            ray.kill(part)  # a server ends with its actor

    async def check(self) -> None:
        """Raise ServersEnded if the server of an engine or the router has ended, or does so within three seconds.

        For whoever saw a call to one fail: what its log says says more than a lost connection.
        """
        deadline = asyncio.get_running_loop().time() + END_SECONDS
        while not (ended := await self._ended()):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(END_POLL_SECONDS)
        names = self._names()
        raise ServersEnded("\n".join(f"{names[client]}: {reason}" for client, reason in ended.items()))

    async def out(self) -> dict[SGLangClient, BaseException]:
        """The clients that get no requests for now, with the reason.

        Their server has ended, or nothing listens there; or it stands still while others do not; or it had been out,
        and has not the weights that the others have. One engine that is slow to answer delays this by three seconds.
        """
        out, still = await self._ended(), self._health.standing_still()
        answering = [client for client in self.clients if client not in out and client not in still]
        if back := [client for client in answering if client in self._out]:
            out |= await self._with_other_weights(back, [client for client in answering if client not in back])
        if any(client not in out for client in answering):
            out |= {client: RuntimeError(f"it {what}") for client, what in still.items() if client not in out}
        self._out = set(out)
        return out

    async def _ended(self) -> dict[SGLangClient, BaseException]:
        """The clients of the servers that have ended, as far as it is known within three seconds."""
        for number, part in enumerate(self._parts()):
            if number not in self._checks or self._checks[number].done():
                self._checks[number] = asyncio.ensure_future(part.check.remote())
        checks = list(self._checks.values())
        if checks:
            await asyncio.wait(checks, timeout=ANSWER_SECONDS)
        ended = {}
        for client, check in zip(self._names(), checks, strict=True):
            if check.done() and (error := check.exception()) is not None:
                ended[client] = error.cause if isinstance(error, RayTaskError) else error
        return ended

    async def _with_other_weights(
        self, back: list[SGLangClient], others: list[SGLangClient]
    ) -> dict[SGLangClient, BaseException]:
        """Those of `back` whose weights are not those of `others`, or, without others, of the last rollout."""
        asked = [*back, *others]
        versions = dict(zip(asked, await asyncio.gather(*map(_version_soon, asked)), strict=True))
        theirs = {versions[client] for client in others} or {self._version}
        right = {version for version in theirs if version is not None}
        return {
            client: RuntimeError(
                f"it is there again with weights of version {versions[client]}, and the run is at version "
                f"{', '.join(sorted(right))}"
            )
            for client in back
            if right and versions[client] not in right
        }

    def pool(self, tokenizer: Any) -> EnginePool:
        """Where samples are generated: at each engine, or at the router, which chooses one."""
        limit = self._config.sglang_server_concurrency
        if self._router_client is None:
            return EnginePool(
                self._config, self.clients, limit, tokenizer, self.out, standing_still=self._health.standing_still
            )
        # The router takes no aborts.
        limit *= len(self.clients)
        return EnginePool(
            self._config,
            [self._router_client],
            limit,
            tokenizer,
            self.out,
            engines=self.clients,
            standing_still=self._health.standing_still,
        )

    async def version(self) -> int | None:
        """Of the weights of the first engine that answers; None before the first sync, and without engines."""
        asked = [asyncio.create_task(_version_of(client)) for client in self.clients if client not in self._out]
        try:
            for answer in asyncio.as_completed(asked):
                if (version := await answer) is not None:
                    self._version = version
                    return int(version) if version.isdecimal() else None
        finally:
            for task in asked:
                task.cancel()
        return None  # what that means is the pool's to say

    async def close(self) -> None:
        """Close connections and end the servers that Miles started. A second call does nothing."""
        await self._health.stop()
        for client in self._names():
            await client.close()
        results = await asyncio.gather(*(part.shutdown.remote() for part in self._parts()), return_exceptions=True)
        for result in results:
            if isinstance(result, RayActorError):  # its node is gone, perhaps, and the run went on with the others
                logger.warning("a server could not be shut down: %s", result)
            elif isinstance(result, BaseException):
                raise result

    def _parts(self) -> list[ActorHandle]:
        return self._engines if self._router is None else [*self._engines, self._router]

    def _names(self) -> dict[SGLangClient, str]:
        """What messages call each server, by its client; in the order of `_parts`."""
        names = {client: f"engine {rank} ({client.url})" for rank, client in enumerate(self.clients)}
        if self._router_client is not None:
            names[self._router_client] = f"the router ({self._router_client.url})"
        return names


async def _version_of(client: SGLangClient) -> str | None:
    try:
        return (await client.model_info())["weight_version"]
    except SGLangError:
        return None


async def _version_soon(client: SGLangClient) -> str | None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await _version_of(client)
    except TimeoutError:
        return None
