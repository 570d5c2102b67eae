"""Which servers have died, and which weights the others have. Real servers: test_rollout_manager.py."""

import pytest
from ray.exceptions import RayActorError

import miles.ray.rollout.engines as engines_module
from miles.backends.sglang_utils.client import SGLangError
from miles.ray.rollout.engines import Engines


class Call:
    """A method of an actor."""

    def __init__(self, result):
        self.result = result

    async def remote(self, *arguments):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Part:
    def __init__(self, url, died=None):
        self.start, self.check, self.shutdown = Call(url), Call(died), Call(None)


class Client:
    def __init__(self, url, **limits):
        self.url, self.version, self.closed = url, "default", 0

    async def model_info(self):
        if self.version is None:
            raise SGLangError(self.url, None, "connection refused", 1)
        return {"weight_version": self.version}

    async def close(self):
        self.closed += 1


@pytest.fixture
async def engines(engine_config, monkeypatch):
    monkeypatch.setattr(engines_module, "SGLangClient", Client)
    monkeypatch.setattr(engines_module, "RouterClient", Client)
    parts = [Part("http://e0"), Part("http://e1", RuntimeError("engine 1: ended by SIGKILL"))]
    engines = Engines(engine_config, parts, Part("http://router", RuntimeError("router: exited")))
    await engines.start()
    return engines


async def test_the_dead_are_named_with_what_is_known_of_them(engines):
    dead = {client.url: str(reason) for client, reason in (await engines.dead()).items()}
    assert dead == {"http://e1": "engine 1: ended by SIGKILL", "http://router": "router: exited"}
    with pytest.raises(RuntimeError, match="engine 1: ended by SIGKILL"):
        await engines.check()


async def test_the_version_is_that_of_an_engine_that_answers(engines):
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
    monkeypatch.setattr(engines_module, "EnginePool", lambda *given, engines=None: built.append((given, engines)))
    engines.pool("tokenizer")
    ((config, clients, limit, tokenizer, check), aborted) = built[0]
    assert [client.url for client in clients] == ["http://router"] and tokenizer == "tokenizer"
    assert aborted == engines.clients and limit == 2 * config.sglang_server_concurrency and check == engines.dead
    await engines.close()
    assert [client.closed for client in (*engines.clients, *clients)] == [1, 1, 1]


async def test_what_is_gone_keeps_nothing_from_being_closed(engines, caplog):
    first, second = engines._engines
    first.shutdown.result = RayActorError()
    await engines.close()
    assert "could not be shut down" in caplog.text
    second.shutdown.result = RuntimeError("it does not end")
    with pytest.raises(RuntimeError, match="it does not end"):
        await engines.close()
