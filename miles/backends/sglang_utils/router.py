"""sglang-router in front of the engines: it chooses the engine of each request. Control calls never go through it."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from miles.backends.sglang_utils.server_process import ServerProcess
from miles.config import RunConfig
from miles.engines.client import QUICK_TIMEOUT_SECONDS, SGLangClient, SGLangError
from miles.utils.errors import UserError
from miles.utils.network import free_port_block, host_port
from miles.utils.tasks import all_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class RouterClient(SGLangClient):
    """Talks to the router at `url`."""

    async def generate(
        self, input_ids: Sequence[Sequence[int]], sampling_params: list[dict[str, object]]
    ) -> list[dict | SGLangError]:
        """Continue each prompt, as an engine would; by one request a prompt, since the router takes no more in one.

        The place of a prompt whose request failed has its error.
        """
        assert len(input_ids) == len(sampling_params)
        requests = zip(input_ids, sampling_params, strict=True)
        return await all_of([self._generate_one(ids, parameters) for ids, parameters in requests])

    async def _generate_one(self, input_ids: Sequence[int], sampling_params: dict[str, object]) -> dict | SGLangError:
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        try:
            return await self._call(
                "POST", "/generate", body, timeout=self._request_timeout, retries=0, flag="--rollout-request-timeout"
            )
        except SGLangError as error:
            return error

    async def workers(self) -> dict[str, dict]:
        """The router's engines by URL; of each its `id` and whether it `is_healthy`."""
        reply = await self._get("/workers")
        return {worker["url"]: worker for worker in reply["workers"]}

    async def add_worker(self, url: str) -> None:
        """Have the router add an engine; it does so after it has answered."""
        await self._control("/workers", {"url": url}, timeout=QUICK_TIMEOUT_SECONDS)

    async def remove_worker(self, worker_id: str) -> None:
        """Have the router take an engine out."""
        path = f"/workers/{worker_id}"
        await self._call("DELETE", path, None, timeout=QUICK_TIMEOUT_SECONDS, retries=0)

    async def wait_for(self, urls: Sequence[str], timeout: float) -> None:
        """Wait until all of `urls` are healthy engines of the router. Raises UserError."""
        deadline = time.monotonic() + timeout
        while True:
            workers = await self.workers()
            missing = [url for url in urls if url not in workers or not workers[url]["is_healthy"]]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise UserError(
                    f"the router at {self.url} did not reach {', '.join(missing)} within {timeout:g} s: see why in "
                    "its log, or give it longer (--rollout-engine-start-timeout)"
                )
            await asyncio.sleep(POLL_SECONDS)


class SGLangRouter:
    """The Ray actor of a router that Miles starts, with --sglang-router-policy.

    Args:
        config: the run's configuration.
        host: address of this node on which the router listens.
    """

    def __init__(self, config: RunConfig, host: str) -> None:
        self._config = config
        self._host = host
        self._process: ServerProcess | None = None

    async def start(self, engine_urls: list[str]) -> str:
        """Start the router, wait until it has all engines, and return its URL. A failed start leaves no process."""
        config = self._config
        port = free_port_block(2, host=self._host)
        url = "http://" + host_port(self._host, port)
        arguments = {
            "host": self._host,
            "port": port,
            "policy": config.sglang_router_policy,
            "request-timeout-secs": config.sglang_router_request_timeout_secs,
            "prometheus-host": self._host,
            "prometheus-port": port + 1,
            "log-level": "warn",
        }
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        assert config.run_dir is not None, "it is derived where it is not given"
        self._process = ServerProcess(
            [sys.executable, "-m", "sglang_router.launch_router", *words, "--worker-urls", *engine_urls],
            dict(os.environ),
            Path(config.run_dir) / "logs" / "router.log",
            url + "/readiness",
        )
        try:
            # Here: the router ends with the thread that starts it.
            self._process.start()
            await asyncio.to_thread(self._process.wait_healthy, config.rollout_engine_start_timeout)
            async with RouterClient(url) as client:
                await client.wait_for(engine_urls, config.rollout_engine_start_timeout)
        except BaseException:
            await self.shutdown()
            raise
        return url

    async def check(self) -> None:
        """Raise `ServerDied`, with the tail of the log, if the router isn't running."""
        assert self._process is not None, "the router was not started"
        self._process.check()

    async def shutdown(self) -> None:
        """End the router; a second call does nothing."""
        if self._process is not None:
            self._process.terminate()


class ExternalRouter:
    """The Ray actor for a router that somebody else runs, at --sglang-router-ip.

    Args:
        config: the run's configuration.
    """

    def __init__(self, config: RunConfig) -> None:
        self._timeout = config.rollout_engine_start_timeout
        ip, port = config.sglang_router_ip, config.sglang_router_port
        assert ip is not None and port is not None, "an external router has an address"
        self._client = RouterClient("http://" + host_port(ip, port))
        self._added: list[str] = []

    async def start(self, engine_urls: list[str]) -> str:
        """Add the engines to the router, wait until it has all of them, and return its URL.

        Raises:
            ValueError: no router answers there, or it has engines of somebody else, which would not get new weights.
        """
        url = self._client.url
        try:
            known = await self._client.workers()
        except SGLangError as error:
            raise UserError(
                f"no sglang-router answers at {url} (--sglang-router-ip, --sglang-router-port): {error}"
            ) from error
        if others := sorted(known.keys() - set(engine_urls)):
            raise UserError(
                f"the router at {url} (--sglang-router-ip) has engines that are not of this run: {', '.join(others)}; "
                "some samples would be theirs: take them out (DELETE /workers/ID), or use another router"
            )
        try:
            for engine_url in engine_urls:
                if engine_url not in known:
                    self._added.append(engine_url)
                    await self._client.add_worker(engine_url)
            await self._client.wait_for(engine_urls, self._timeout)
        except BaseException:
            await self.shutdown()
            raise
        return url

    async def check(self) -> None:
        """Raise SGLangError if nothing listens there any more."""
        await self._client.require_reachable()

    async def shutdown(self) -> None:
        """Take the engines out that were added; a second call does nothing. The router goes on."""
        added, self._added = self._added, []
        try:
            workers = await self._client.workers() if added else {}
            for url in workers.keys() & set(added):
                await self._client.remove_worker(workers[url]["id"])
        except SGLangError as error:
            logger.warning("the engines could not be taken out of the router: %s", error)
        await self._client.close()
