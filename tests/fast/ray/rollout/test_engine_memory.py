"""Every call in every state, on an engine that is as strict as SGLang: what would end its process fails the test."""

import asyncio
import itertools

import pytest

import miles.ray.rollout.engine_memory as engine_memory
import miles.ray.rollout.engines as engines_module
from miles.engines.client import SGLangError
from miles.ray.rollout.engine_memory import EngineMemory, RolloutMemory
from miles.ray.rollout.rollout_manager import RolloutManager
from miles.residency.plan import ENGINE_REGIONS, Move, Party, Place, Region
from miles.residency.state import ResidencyError

TAGS = [str(region) for region in ENGINE_REGIONS]
SIZES = {"weights": 2, "kv_cache": 30, "cuda_graph": 0.5}


def subsets(least):
    sizes = range(least, len(TAGS) + 1)
    return [pytest.param(set(some), id="+".join(some)) for n in sizes for some in itertools.combinations(TAGS, n)]


class StrictEngine:
    """The client of an engine that keeps no request waiting; `fail[call]` are errors that a call raises, in turn."""

    def __init__(self, url="http://e0"):
        self.url, self.away, self.calls, self.fail = url, set(), [], {}
        self.version, self.running, self.delay = "default", 0, 0.0

    async def _called(self, name, *arguments):
        self.calls.append(" ".join([name, *arguments]))
        await asyncio.sleep(self.delay)
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    async def release_memory_occupation(self, tags):
        assert tags and not self.away & set(tags) and not self.running
        await self._called("release", *tags)
        self.away |= set(tags)

    async def resume_memory_occupation(self, tags):
        assert tags and self.away >= set(tags)
        await self._called("resume", *tags)
        self.away -= set(tags)

    async def flush_cache(self, timeout):
        assert "kv_cache" not in self.away
        await self._called("flush")

    async def abort(self):
        await self._called("abort")
        self.running = 0

    async def running_requests(self):
        return self.running

    async def model_info(self):
        await self._called("model")
        return {"weight_version": self.version}

    async def server_info(self):
        await self._called("info")
        usage = {"weight": SIZES["weights"], "kvcache": SIZES["kv_cache"], "graph": SIZES["cuda_graph"]}
        return {"tp_size": 2, "internal_states": [{"memory_usage": usage}]}

    async def close(self):
        pass


def out(*tags):
    """The moves of a release."""
    return tuple(Move(Party.ENGINE, Region(tag), Place.GPU, Place.DROPPED) for tag in TAGS if tag in tags)


def home(*tags):
    """The moves of a return, in the same order."""
    return tuple(move.reversed() for move in out(*tags))


def calls_that_move(engine):
    return [call for call in engine.calls if call.startswith(("re", "flush"))]


def answer(status):
    return SGLangError("http://e0/release", status, "busy", 1)


async def nobody_died():
    pass


async def in_state(away):
    """An engine whose regions `away` are released, and its memory."""
    engine = StrictEngine()
    memory = EngineMemory("engine 0", engine)
    await memory.measure()
    await memory.move(out(*away))
    engine.calls.clear()
    return engine, memory


def rollout_memory(engines, check=nobody_died):
    return RolloutMemory([EngineMemory(f"engine {i}", engine) for i, engine in enumerate(engines)], check)


async def generate(memory):
    async with memory.in_use("rollout 1"):
        pass


@pytest.mark.parametrize("away", subsets(0))
@pytest.mark.parametrize("asked", subsets(1))
async def test_every_call_in_every_state(away, asked):
    engine, memory = await in_state(away)
    moved = await memory.move(out(*asked))
    assert engine.away == away | asked
    assert moved == sum(SIZES[tag] for tag in asked - away) * 2**30 * 2
    flushes = ["flush"] * ("kv_cache" not in away)
    expected = " ".join(["release", *(tag for tag in TAGS if tag in asked - away)])
    assert calls_that_move(engine) == ([*flushes, expected] if asked - away else [])

    engine, memory = await in_state(away)
    moved = await memory.move(home(*asked))
    assert engine.away == away - asked
    assert moved == sum(SIZES[tag] for tag in asked & away) * 2**30 * 2
    expected = " ".join(["resume", *(tag for tag in TAGS if tag in asked & away)])
    assert calls_that_move(engine) == ([expected] if asked & away else [])
    # Weights that were away are back, but stale.
    assert bool(await memory.missing()) == bool(away - asked or "weights" in away)


@pytest.mark.parametrize(("verb", "way"), [("release", out), ("resume", home)])
@pytest.mark.parametrize("status", [None, 500])
async def test_a_lost_call_breaks_its_regions_and_is_remembered(verb, way, status):
    engine, memory = await in_state(set() if verb == "release" else {"kv_cache", "weights"})
    engine.fail[verb] = [answer(status)]
    with pytest.raises(ResidencyError, match="engine 0: whether kv_cache, weights moved from .*busy") as caught:
        await memory.move(way("kv_cache", "weights"))
    room = ". 68.72 GB were to come back, and SGLang ends where there is no room: if its log says so, lower "
    assert (room + "--sglang-mem-fraction-static" in str(caught.value)) == (verb == "resume")
    seen = list(engine.calls)
    for again in (out, home):
        for tag in ("kv_cache", "weights"):
            with pytest.raises(ResidencyError, match=f"engine 0: {tag} is broken: its last move failed: .*busy"):
                await memory.move(again(tag, "cuda_graph"))
    assert engine.calls == seen and (await memory.missing())[:1] == ["kv_cache is broken"]
    await memory.move(out("cuda_graph"))
    await memory.move(home("cuda_graph"))


async def test_a_cancelled_call_breaks_its_regions():
    engine, memory = await in_state(set())
    engine.delay = 10
    engine.flush_cache = lambda timeout: asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(memory.move(out("kv_cache")), 0.05)
    with pytest.raises(ResidencyError, match="kv_cache is broken: .*CancelledError"):
        await memory.move(home("kv_cache"))


async def test_requests_are_aborted_once_they_have_had_their_time():
    engine, memory = await in_state(set())
    engine.running, engine.fail["flush"] = 3, [answer(400)]
    await memory.move(out("kv_cache"))
    assert engine.calls == ["flush", "abort", "flush", "release kv_cache"]


async def test_requests_that_cannot_be_aborted_stop_the_release_and_leave_the_state():
    engine, memory = await in_state(set())
    engine.running, engine.fail["flush"] = 3, [answer(400), answer(400)]
    engine.abort = lambda: asyncio.sleep(0)
    with pytest.raises(ResidencyError, match="engine 0: .*3 requests still run"):
        await memory.move(out("kv_cache"))
    engine.fail["flush"] = [answer(None)]
    with pytest.raises(SGLangError):
        await memory.move(out("kv_cache"))
    assert not await memory.missing()
    engine.running = 0
    await memory.move(out("kv_cache"))
    assert engine.away == {"kv_cache"}


async def test_released_weights_are_stale_until_the_version_changes():
    engine, memory = await in_state({"weights"})
    assert await memory.missing() == ["weights is dropped"]
    await memory.move(home("weights"))
    assert await memory.missing() == ["weights were released at version default and not updated since"]
    engine.version = "1"
    assert await memory.missing() == []
    await memory.move(out("kv_cache"))
    await memory.move(home("kv_cache"))
    assert await memory.missing() == []
    await memory.move(out("weights"))
    await memory.move(home("weights"))
    assert await memory.missing() == ["weights were released at version 1 and not updated since"]


async def test_engines_move_side_by_side_and_all_are_awaited():
    engines = [StrictEngine(f"http://e{i}") for i in range(3)]
    for engine in engines:
        engine.delay = 0.1
    memory = rollout_memory(engines)
    await memory.measure()
    metrics = await memory.move(out("kv_cache"))
    assert metrics["perf/offload_rollout_bytes"] == 3 * 30 * 2**30 * 2
    assert 0.2 <= metrics["perf/offload_rollout_time"] < 0.5
    engines[0].fail["resume"] = [answer(None)]
    with pytest.raises(ResidencyError, match="engine 0: whether kv_cache"):
        await memory.move(home("kv_cache"))
    assert [engine.away for engine in engines] == [{"kv_cache"}, set(), set()]
    with pytest.raises(ResidencyError, match="rollout 1 needs all .*: engine 0: kv_cache is broken$"):
        await generate(memory)


async def test_a_dead_engine_is_what_the_error_says():
    async def check():
        raise RuntimeError("the server (pid 7) was ended by SIGKILL")

    engine = StrictEngine()
    engine.fail["release"] = [answer(None)]
    memory = rollout_memory([engine], check=check)
    with pytest.raises(RuntimeError, match="pid 7"):
        await memory.move(out("weights"))
    engine.fail["info"] = [answer(None)]
    with pytest.raises(RuntimeError, match="pid 7"):
        await memory.measure()
    memory = rollout_memory([engine], check=check)
    await memory.move(out("weights"))
    await memory.move(home("weights"))
    engine.fail["model"] = [answer(None)]
    with pytest.raises(RuntimeError, match="pid 7"):
        await generate(memory)


async def test_no_memory_moves_under_a_rollout(monkeypatch):
    engine = StrictEngine()
    memory, events = rollout_memory([engine]), []

    async def rollout():
        async with memory.in_use("rollout 1"):
            await asyncio.sleep(0.1)
            events.append("rollout")

    running = asyncio.create_task(rollout())
    await asyncio.sleep(0)
    await memory.move(out("kv_cache"))
    assert events == ["rollout"] and engine.away == {"kv_cache"}
    await memory.move(home("kv_cache"))

    monkeypatch.setattr(engine_memory, "IDLE_SECONDS", 0.02)
    again, calls = asyncio.create_task(rollout()), list(engine.calls)
    await asyncio.sleep(0)
    with pytest.raises(ResidencyError, match="offload: the engines are still in use: rollout 1"):
        await memory.move(out("kv_cache"))
    await asyncio.gather(running, again)
    assert engine.calls == calls


async def test_no_rollout_begins_while_memory_moves():
    engine = StrictEngine()
    engine.delay = 0.05
    memory = rollout_memory([engine])
    moving = asyncio.create_task(memory.move(out("kv_cache")))
    await asyncio.sleep(0.02)
    with pytest.raises(ResidencyError, match="rollout 1 needs the engines, whose memory is being moved"):
        await generate(memory)
    await moving
    await memory.move(home("kv_cache"))
    await generate(memory)


async def test_unknown_tags_are_refused(engine_config):
    manager = RolloutManager(engine_config, [])
    for call in (manager.offload, manager.onload):
        with pytest.raises(ValueError, match="weight: no such tag; there are cuda_graph, kv_cache, weights"):
            await call(["weight", "kv_cache"])


class _Remote:
    def __init__(self, value):
        self._value = value

    async def remote(self):
        return self._value


class _Actor:
    """What the manager asks of an engine's actor."""

    start, check = _Remote("http://e0"), _Remote(None)


@pytest.mark.parametrize(
    "on, levels, may_leave",
    [
        (False, ["kv_cache", "weight"], set()),
        (True, [], {"cuda_graph"}),
        (True, ["kv_cache"], {"cuda_graph", "kv_cache"}),
        (True, ["weight"], {"cuda_graph", "weights"}),
        (True, ["kv_cache", "weight"], {"cuda_graph", "kv_cache", "weights"}),
    ],
)
async def test_what_no_level_names_never_moves(engine_config, monkeypatch, on, levels, may_leave):
    engine = StrictEngine()
    monkeypatch.setattr(engines_module, "SGLangClient", lambda url, **_: engine)
    config = engine_config.model_copy(update={"offload_rollout": on, "offload_rollout_level": levels})
    manager = RolloutManager(config, [_Actor()])
    await manager.start()

    await manager.offload_kv()
    assert engine.away == may_leave & {"cuda_graph", "kv_cache"}
    await manager.offload_weights()
    assert engine.away == may_leave
    metrics = await manager.onload_weights()
    assert metrics.get("perf/onload_rollout_bytes") == (4 * 2**30 if "weights" in may_leave else None)
    assert engine.away == may_leave - {"weights"}
    await manager.onload_kv()
    assert engine.away == set()
    await manager.offload(TAGS)
    assert engine.away == may_leave
    await manager.onload([Region.WEIGHTS])
    await manager.onload(TAGS)
    assert engine.away == set()
    touched = {tag for call in calls_that_move(engine) for tag in call.split()[1:]}
    assert touched == may_leave
