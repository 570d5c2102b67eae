import asyncio
import time

import pytest

from miles.backends.sglang_utils.client import SGLangClient
from miles.backends.sglang_utils.router import ExternalRouter, RouterClient, SGLangRouter
from miles.backends.sglang_utils.server_process import ServerDied
from miles.backends.sglang_utils.supervisor import group_members
from miles.utils.network import free_port

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
        with pytest.raises(TimeoutError, match="did not reach http://127.0.0.1:9 within 0.5 s"):
            await lost.start([engine_server, again, "http://127.0.0.1:9"])

        await joined.shutdown()
        await joined.shutdown()
        deadline = time.monotonic() + 10
        while len(await routed.workers()) > 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert (await routed.workers()).keys() == {engine_server}
        with pytest.raises(TimeoutError, match="did not reach http://10.0.0.7:1 within 0 s"):
            await routed.wait_for(["http://10.0.0.7:1", engine_server], 0)

    await router.check()
    await router.shutdown()
    assert group_members(router._process.pid) == []
    with pytest.raises(ServerDied, match="router.log"):
        await router.check()
    await router.shutdown()


async def test_no_router_there(engine_config):
    given = engine_config.model_copy(update={"sglang_router_ip": "127.0.0.1", "sglang_router_port": free_port()})
    router = ExternalRouter(given)
    with pytest.raises(ValueError, match=r"no sglang-router answers at .*\(--sglang-router-ip, --sglang-router-port\)"):
        await router.start(["http://127.0.0.1:1"])
    await router.shutdown()
