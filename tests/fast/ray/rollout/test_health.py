"""The health of a real engine. What follows from it: test_engines.py, test_engine_pool_faults.py."""

import asyncio
import logging

import psutil

from miles.engines.client import SGLangClient
from miles.ray.rollout.health import Health


def scheduler_of(url):
    """The process that computes for the server at `url`."""
    port = f"--port {url.rsplit(':', 1)[1]} "
    processes = psutil.process_iter(["cmdline"])
    started = [process for process in processes if port in " ".join(process.info["cmdline"] or ())]
    children = {child for process in started for child in process.children(recursive=True)}
    # By its title: torch may rename a process's first thread, and with it the process.
    (scheduler,) = [child for child in children if " ".join(child.cmdline()).startswith("sglang::scheduler")]
    return scheduler


async def test_an_engine_that_stands_still_is_named_and_answers_again(engine_config, engine_server, caplog):
    caplog.set_level(logging.WARNING)
    times = {"rollout_health_check_interval": 0.1, "rollout_health_check_timeout": 2.0}
    scheduler = scheduler_of(engine_server)

    async def said(text):
        async with asyncio.timeout(60):
            while not [record for record in caplog.records if text in record.message]:
                await asyncio.sleep(0.05)

    async with SGLangClient(engine_server) as client:
        health = Health(engine_config.model_copy(update=times), {client: "engine 0"})
        # Neither a pause nor its own load report says anything about it.
        await client.pause("retract")
        await client.server_info()
        await client.continue_()
        scheduler.suspend()
        try:
            health.start()
            await said("engine 0 has not answered its health check for")
            assert list(health.standing_still()) == [client]
            await client.running_requests()
        finally:
            scheduler.resume()
        await said("engine 0 answers again, after")
        assert not health.standing_still()
        await health.stop()
