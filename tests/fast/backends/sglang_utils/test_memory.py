"""Release and return of memory on one real CPU server, through the RolloutManager."""

import asyncio

import psutil
import pytest
from safetensors.torch import load_file

import miles.ray.rollout.engine_memory as engine_memory
from miles.backends.sglang_utils.engine import SGLangEngine
from miles.engines.client import SGLangClient
from miles.ray.rollout.rollout_manager import RolloutManager
from miles.residency.state import ResidencyError
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.utils.arguments import parse_args
from miles.weight_sync.bucket import handle
from miles.weight_sync.session import UpdateSession
from tests.fast.weight_sync.test_bucket import bucket_of

pytestmark = pytest.mark.real

LAYERS, TOKENS = 2, 250_000
PROMPTS = [list(b"12+34="), list(b"the quick brown fox")]
MB = 1e6


class LocalEngine:
    """The calls of an engine's Ray actor, on an engine in this process."""

    def __init__(self, engine):
        self.start, self.check, self.shutdown = map(_Remote, (engine.start, engine.check, engine.shutdown))


class _Remote:
    def __init__(self, method):
        self._method = method

    async def remote(self):
        return await asyncio.to_thread(self._method)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """27 MB of weights in float32, the head tied to the embedding."""
    folder = tmp_path_factory.mktemp("memory") / "model"
    make_tiny_checkpoint(folder, hidden_size=512, intermediate_size=2048, num_layers=LAYERS, init_std=0.1)
    return folder


@pytest.fixture(scope="module")
def config(engine_flags, tiny_checkpoint, checkpoint, prompt_file, tmp_path_factory):
    flags = [str(checkpoint) if flag == str(tiny_checkpoint) else flag for flag in engine_flags]
    flags += ["--debug-rollout-only", "--sglang-max-total-tokens", str(TOKENS)]
    flags += ["--eval-interval", "1", "--eval-prompt-data", "held-out", str(prompt_file)]
    parsed = parse_args([*flags, "--run-dir", str(tmp_path_factory.mktemp("run"))])
    # Only the engine runs here; the configuration would drop the flags.
    return parsed.model_copy(update={"colocate": True, "offload_rollout": True})


@pytest.fixture(scope="module")
def engine(config):
    engine = SGLangEngine(config, 0, [])
    url = engine.start()
    engine.start = lambda: url  # for every manager anew
    yield engine
    engine.shutdown()


@pytest.fixture
async def manager(config, engine, checkpoint):
    """A manager of the running server, all of whose memory is there and whose weights are the checkpoint's."""
    manager = RolloutManager(config, [LocalEngine(engine)])
    await manager.start()
    yield manager
    await manager.onload(["cuda_graph", "kv_cache", "weights"])
    await update(manager, checkpoint)
    for client in manager._engines.clients:
        await client.close()


async def update(manager, checkpoint):
    """All weights of the checkpoint, as the weight sync sends them, with the next version."""
    (url,) = await manager.engine_urls()
    async with SGLangClient(url) as client:
        version = (await client.model_info())["weight_version"]
        weights = load_file(checkpoint / "model.safetensors")
        session = UpdateSession(client, weights, 1 if version == "default" else int(version) + 1, False, "abort")
        await session.open()
        bucket, flat = bucket_of(weights)
        handles = [handle(bucket, flat)]
        await client.update_weights_from_tensor(handles, load_format="flattened_bucket", flush_cache=False)
        session.sent(weights)
        await session.finish()


async def log_probs(manager):
    """Of greedy answers. One prompt at a time and from an empty cache: the last bit depends on what shares a batch."""
    (client,) = manager._engines.clients
    await client.flush_cache()
    answers = []
    for prompt in PROMPTS:
        answers += await client.generate([prompt], [{"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}])
    return [answer["meta_info"]["output_token_logprobs"] for answer in answers]


def resident(engine):
    """Bytes that the scheduler process holds."""
    processes = psutil.Process(engine._server.pid).children(recursive=True)
    (scheduler,) = [process for process in processes if " ".join(process.cmdline()).startswith("sglang::scheduler")]
    return scheduler.memory_info().rss


async def test_every_region_really_leaves_and_comes_back(manager, engine, checkpoint):
    expected = await log_probs(manager)
    cache = LAYERS * 2 * (TOKENS + 1) * 2 * 32 * 4
    # SGLang pads the 264 rows of the embedding to 320; an update has to write those, too.
    padding = (320 - 264) * 512 * 4
    weights = sum(tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values()) + padding
    before = resident(engine)

    assert (await manager.offload_kv())["perf/offload_rollout_bytes"] == cache
    assert abs(before - resident(engine) - cache) < 5 * MB
    metrics = await manager.offload_weights()
    assert metrics["perf/offload_rollout_bytes"] == weights and metrics["perf/offload_rollout_time"] > 0
    assert abs(before - resident(engine) - cache - weights) < 5 * MB

    # The order of the hand-over: the weights are written while the cache is away.
    assert (await manager.onload_weights())["perf/onload_rollout_bytes"] == weights
    await update(manager, checkpoint)
    assert (await manager.onload_kv())["perf/onload_rollout_bytes"] == cache
    assert abs(before - resident(engine)) < 10 * MB
    assert await log_probs(manager) == expected
    assert (await manager.generate(0)).metrics["rollout/reward_error_ratio"] == 0


async def test_repeated_calls_do_nothing(manager, engine):
    tags = ["cuda_graph", "kv_cache", "weights"]
    assert (await manager.onload(tags))["perf/onload_rollout_bytes"] == 0
    first = await manager.offload(["kv_cache", "cuda_graph"])
    low = resident(engine)
    again = await manager.offload(["cuda_graph", "kv_cache"])
    assert first["perf/offload_rollout_bytes"] > 100 * MB and again["perf/offload_rollout_bytes"] == 0
    assert abs(resident(engine) - low) < 5 * MB
    await manager.onload(tags)
    await manager.onload_kv()
    await log_probs(manager)


async def test_nothing_is_generated_while_memory_is_away_or_weights_are_stale(manager, checkpoint):
    expected = await log_probs(manager)
    await manager.offload(["weights", "kv_cache"])
    with pytest.raises(ResidencyError, match=r"rollout 3 needs .*engine 0 \(http.*kv_cache is dropped, weights is"):
        await manager.generate(3)
    with pytest.raises(ResidencyError, match="evaluation after rollout 3 needs .*kv_cache is dropped"):
        await manager.evaluate(3, before_training=False)
    await manager.onload_weights()
    await manager.onload_kv()
    with pytest.raises(ResidencyError, match=r"rollout 3 needs .*weights were released at version .* not updated"):
        await manager.generate(3)
    # What would have come of it: not a number.
    assert await log_probs(manager) == [[[None, 0, None]] * 12] * 2
    await update(manager, checkpoint)
    await manager.evaluate(3, before_training=False)
    assert await log_probs(manager) == expected


async def test_running_requests_are_waited_for(manager):
    (client,) = manager._engines.clients
    request = asyncio.create_task(client.generate(PROMPTS, [{"max_new_tokens": 100, "ignore_eos": True}] * 2))
    await asyncio.sleep(0.1)
    assert not request.done()
    await manager.offload_kv()
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in await asyncio.wait_for(request, 1)]
    assert reasons == ["length", "length"]


async def test_requests_that_run_for_too_long_are_aborted(manager, monkeypatch):
    monkeypatch.setattr(engine_memory, "IDLE_SECONDS", 0.3)
    (client,) = manager._engines.clients
    request = asyncio.create_task(client.generate(PROMPTS, [{"max_new_tokens": 2000, "ignore_eos": True}] * 2))
    await asyncio.sleep(0.1)
    await manager.offload_kv()
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in await asyncio.wait_for(request, 1)]
    assert reasons == ["abort", "abort"]


async def test_running_requests_are_counted(manager):
    (client,) = manager._engines.clients
    request = asyncio.create_task(client.generate(PROMPTS, [{"max_new_tokens": 2000, "ignore_eos": True}] * 2))
    await asyncio.sleep(0.3)
    assert await client.running_requests() == 2
    await client.abort()
    await request
    assert await client.running_requests() == 0
