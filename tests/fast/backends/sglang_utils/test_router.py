import asyncio
import time

import pytest
from transformers import AutoTokenizer

from miles.backends.sglang_utils.router import ExternalRouter, RouterClient, SGLangRouter
from miles.backends.sglang_utils.server_process import ServerDied
from miles.backends.sglang_utils.supervisor import group_members
from miles.engines.client import SGLangClient
from miles.rollout.engine_pool import EnginePool
from miles.utils.errors import UserError
from miles.utils.network import free_port
from miles.utils.types import Sample

PROMPTS = [[97, 98, 99], [100, 101], [102]]


def sampling(seed):
    return {"temperature": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None, "sampling_seed": 2**62 + seed}


async def test_samples_of_a_router_are_those_of_its_engine(engine_config, engine_server, tmp_path):
    """One router for all of its life: started, used, shared with somebody else's, ended."""
    config = engine_config.model_copy(update={"run_dir": str(tmp_path), "sglang_router_policy": "round_robin"})
    router = SGLangRouter(config, "127.0.0.1")
    url = await router.start([engine_server])
    parameters = [sampling(seed) for seed in range(3)]
    async with RouterClient(url) as routed, SGLangClient(engine_server) as direct:
        replies, expected = await asyncio.gather(*(c.generate(PROMPTS, parameters) for c in (routed, direct)))
        assert [r["output_ids"] for r in replies] == [r["output_ids"] for r in expected]
        for reply, other in zip(replies, expected, strict=True):
            pairs = zip(*(r["meta_info"]["output_token_logprobs"] for r in (reply, other)), strict=True)
            assert all(abs(a[0] - b[0]) < 1e-4 and a[1] == b[1] for a, b in pairs)

        await check_hold(config, routed, direct)
        async with RouterClient("http://127.0.0.1:9") as nobody:
            replies = await nobody.generate(PROMPTS, parameters)
        assert [reply.status for reply in replies] == [None] * 3, "each prompt has an error of its own"

        # The same router, as one that somebody else started; the same engine under a second name.
        again = engine_server.replace("127.0.0.1", "localhost")
        host, port = url.removeprefix("http://").split(":")
        given = config.model_copy(update={"sglang_router_ip": host, "sglang_router_port": int(port)})
        joined = ExternalRouter(given)
        assert await joined.start([engine_server, again]) == url
        assert (await routed.workers()).keys() == {engine_server, again}
        assert all(reply["output_ids"] for reply in await routed.generate(PROMPTS, parameters))
        await joined.check()
        foreign = ExternalRouter(given)
        with pytest.raises(ValueError, match=f"has engines that are not of this run: {engine_server}; some samples"):
            await foreign.start([again])
        await foreign.shutdown()
        lost = ExternalRouter(given.model_copy(update={"rollout_engine_start_timeout": 0.5}))
        with pytest.raises(UserError, match="did not reach http://127.0.0.1:9 within 0.5 s"):
            await lost.start([engine_server, again, "http://127.0.0.1:9"])

        await joined.shutdown()
        await joined.shutdown()
        deadline = time.monotonic() + 10
        while len(await routed.workers()) > 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert (await routed.workers()).keys() == {engine_server}
        with pytest.raises(UserError, match="did not reach http://10.0.0.7:1 within 0 s"):
            await routed.wait_for(["http://10.0.0.7:1", engine_server], 0)

    await router.check()
    await router.shutdown()
    assert group_members(router._process.pid) == []
    with pytest.raises(ServerDied, match="router.log"):
        await router.check()
    await router.shutdown()


async def check_hold(config, routed, direct):
    """What the router has forwarded is aborted at the engine, and goes on later."""

    async def all_live():
        return {}

    tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
    pool = EnginePool(config, [routed], 8, tokenizer, all_live, engines=[direct])
    samples = [Sample(index=i, tokens=list(tokens)) for i, tokens in enumerate(PROMPTS)]
    parameters = [sampling(seed) | {"max_new_tokens": 300, "ignore_eos": True} for seed in range(3)]
    work = asyncio.create_task(pool.complete(samples, parameters))
    while await direct.running_requests() < 3:
        await asyncio.sleep(0.01)
    await pool.hold()
    await work
    assert {sample.status for sample in samples} == {Sample.Status.ABORTED}
    lengths = [sample.response_length for sample in samples]
    assert all(0 < length < 300 for length in lengths)
    pool.release()
    await pool.complete(samples, [{**given, "max_new_tokens": 5} for given in parameters])
    assert [sample.response_length - 5 for sample in samples] == lengths


async def test_no_router_there(engine_config):
    given = engine_config.model_copy(update={"sglang_router_ip": "127.0.0.1", "sglang_router_port": free_port()})
    router = ExternalRouter(given)
    with pytest.raises(ValueError, match=r"no sglang-router answers at .*\(--sglang-router-ip, --sglang-router-port\)"):
        await router.start(["http://127.0.0.1:1"])
    await router.shutdown()
