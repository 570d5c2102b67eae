"""Which servers get requests, and which weights the others have. Real servers: test_rollout_manager.py."""

import asyncio
import logging
import time

import pytest
from ray.exceptions import RayActorError

import miles.ray.rollout.engines as engines_module
import miles.ray.rollout.health as health_module
from miles.engines.client import SGLangError
from miles.ray.rollout.engines import Engines, ServersEnded


class Call:
    """A method of an actor; None as its result: it never answers."""

    def __init__(self, *results):
        self.results = list(results)

    async def remote(self, *arguments):
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return await asyncio.sleep(600) if result is None else result


class Part:
    def __init__(self, url, check="alive"):
        self.start, self.check, self.shutdown = Call(url), Call(check), Call("done")


class Client:
    """`version` None: it refuses connections. `hangs`: an event that it waits for before it answers."""

    def __init__(self, url, **limits):
        self.url, self.version, self.closed = url, "default", 0
        self.hangs = asyncio.Event()
        self.hangs.set()

    async def model_info(self):
        await self.hangs.wait()
        if self.version is None:
            raise SGLangError(self.url, None, "connection refused", 1)
        return {"weight_version": self.version}

    server_info = model_info

    async def close(self):
        self.closed += 1


@pytest.fixture
async def make_engines(engine_config, monkeypatch):
    monkeypatch.setattr(engines_module, "SGLangClient", Client)
    monkeypatch.setattr(engines_module, "RouterClient", Client)
    monkeypatch.setattr(engines_module, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(engines_module, "END_SECONDS", 0.3)
    monkeypatch.setattr(engines_module, "END_POLL_SECONDS", 0.01)
    monkeypatch.setattr(health_module, "READ_SECONDS", 0.1)
    times = {"rollout_health_check_interval": 0.01, "rollout_health_check_timeout": 0.1}
    made = []

    async def make(*parts, router=None):
        made.append(Engines(engine_config.model_copy(update=times), list(parts), router))
        await made[-1].start()
        return made[-1]

    yield make
    for engines in made:
        await engines._health.stop()


@pytest.fixture
async def engines(make_engines):
    dead = Part("http://e1", RuntimeError("the server was ended by SIGKILL"))
    return await make_engines(Part("http://e0"), dead, router=Part("http://router", RuntimeError("it exited")))


async def urls_out(engines):
    return {client.url: str(reason) for client, reason in (await engines.out()).items()}


async def eventually(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_dead_are_named_with_what_is_known_of_them(engines):
    assert await urls_out(engines) == {"http://e1": "the server was ended by SIGKILL", "http://router": "it exited"}
    # Side by side, as a failed sync and the pool ask.
    out, error = await asyncio.gather(urls_out(engines), engines.check(), return_exceptions=True)
    assert len(out) == 2 and isinstance(error, ServersEnded)
    said = "engine 1 (http://e1): the server was ended by SIGKILL\nthe router (http://router): it exited"
    assert str(error) == said


async def test_an_end_that_is_seen_a_moment_after_the_failure_is_named_too(make_engines):
    engines = await make_engines(Part("http://e0"), Part("http://e1"))
    await engines.check()
    engines._engines[1].check = Call("alive", "alive", RuntimeError("Last lines of engine_1.log"))
    with pytest.raises(ServersEnded, match=r"engine 1 \(http://e1\): Last lines of engine_1.log"):
        await engines.check()


async def test_one_that_does_not_answer_delays_nobody_for_long(make_engines):
    """Of a lost host neither the actor nor the server answers; the others are known all the same."""
    engines = await make_engines(Part("http://e0", None), Part("http://e1", RuntimeError("gone")), Part("http://e2"))
    engines.clients[0].hangs.clear()
    for client in engines.clients[1:]:
        client.version = "4"
    start = time.monotonic()
    assert "http://e1" in await urls_out(engines)
    assert await engines.version() == 4
    assert time.monotonic() - start < 2


async def test_one_that_stands_still_is_named_gets_nothing_and_comes_back(make_engines, caplog):
    engines = await make_engines(Part("http://e0"), Part("http://e1"))
    hung = engines.clients[1]
    hung.hangs.clear()
    await eventually(lambda: caplog.records)
    said = "has not answered its health check for 0 s (--rollout-health-check-timeout 0.1)"
    assert [(r.levelno, r.message) for r in caplog.records] == [(logging.ERROR, f"engine 1 (http://e1) {said}")]
    assert list(await urls_out(engines)) == ["http://e1"]
    hung.hangs.set()
    await eventually(lambda: len(caplog.records) > 1)
    assert "engine 1 (http://e1) answers again, after" in caplog.records[1].message
    assert await urls_out(engines) == {}


async def test_a_busy_loop_is_not_taken_for_a_server_that_stands_still(make_engines, caplog, monkeypatch):
    """Here, where batches are made: answers wait to be read meanwhile."""
    monkeypatch.setattr(health_module, "READ_SECONDS", 10.0)
    engines = await make_engines(Part("http://e0"))
    for client in engines.clients:
        client.hangs.clear()
    await asyncio.sleep(0.05)
    time.sleep(0.3)
    for client in engines.clients:
        asyncio.get_running_loop().call_later(0.02, client.hangs.set)
    await asyncio.sleep(0.2)
    assert not caplog.records


async def test_the_last_one_is_not_given_up_for_standing_still(make_engines):
    """It may be at a long piece of work, and there is nobody else to ask."""
    engines = await make_engines(Part("http://e0"), Part("http://e1", RuntimeError("gone")))
    engines.clients[0].hangs.clear()
    await eventually(engines._health.standing_still)
    assert await urls_out(engines) == {"http://e1": "gone"}
    # Nor where the other one is there again, and of no use.
    engines._version = "4"
    engines._engines[1].check = Call("alive")
    assert list(await urls_out(engines)) == ["http://e1"]


async def test_one_that_is_there_again_needs_the_weights_of_the_others(make_engines):
    engines = await make_engines(Part("http://e0"), Part("http://e1"))
    first, second = engines.clients
    first.version, second.version = "4", "4"
    assert await engines.version() == 4
    engines._engines[1].check = Call(SGLangError("http://e1/model_info", None, "refused", 3))
    assert list(await urls_out(engines)) == ["http://e1"]
    engines._engines[1].check = Call("alive")
    second.version = "default"
    for _ in range(2):
        assert await urls_out(engines) == {
            "http://e1": "it is there again with weights of version default, and the run is at version 4"
        }
    first.version = second.version = "5"  # a sync
    assert await urls_out(engines) == {}
    # Without others it needs those of the last rollout.
    assert await engines.version() == 5
    for engine in engines._engines:
        engine.check = Call(RuntimeError("refused"))
    assert len(await urls_out(engines)) == 2
    engines._engines[1].check = Call("alive")
    assert list(await urls_out(engines)) == ["http://e0"]


async def test_the_version_is_that_of_an_engine_that_answers(make_engines):
    engines = await make_engines(Part("http://e0"), Part("http://e1"))
    first, second = engines.clients
    assert await engines.version() is None  # before the first sync
    first.version, second.version = "4", "4"
    assert await engines.version() == 4
    first.version = None
    assert await engines.version() == 4
    second.version = None
    assert await engines.version() is None


async def test_requests_go_to_the_router_and_aborts_to_the_engines(engines, monkeypatch):
    built = []
    monkeypatch.setattr(engines_module, "EnginePool", lambda *given, **more: built.append((given, more)))
    engines.pool("tokenizer")
    ((config, clients, limit, tokenizer, check), more) = built[0]
    assert [client.url for client in clients] == ["http://router"] and tokenizer == "tokenizer"
    assert more["engines"] == engines.clients and limit == 2 * config.sglang_server_concurrency
    assert check == engines.out
    await engines.close()
    assert [client.closed for client in (*engines.clients, *clients)] == [1, 1, 1]


async def test_what_is_gone_keeps_nothing_from_being_closed(engines, caplog):
    first, second = engines._engines
    first.shutdown = Call(RayActorError())
    await engines.close()
    assert "could not be shut down" in caplog.text
    second.shutdown = Call(RuntimeError("it does not end"))
    with pytest.raises(RuntimeError, match="it does not end"):
        await engines.close()
