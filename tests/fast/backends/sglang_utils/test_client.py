import asyncio
import pickle
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import miles.backends.sglang_utils.client as client_module
from miles.backends.sglang_utils.client import SGLangClient, SGLangError


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", 0.01)


@pytest.fixture
async def misbehaving():
    """A server whose /generate plays the handlers of `script`, one a request; `seen` holds the requests' bodies."""

    class Server:
        def __init__(self):
            self.script, self.seen = [], []

        async def handle(self, request):
            self.seen.append(await request.json())
            return await self.script[min(len(self.seen), len(self.script)) - 1](request)

    server = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    test_server = TestServer(app)
    await test_server.start_server()
    server.url = str(test_server.make_url("")).rstrip("/")
    yield server
    await test_server.close()


def answers(status=200, body=None):
    async def handler(request):
        return web.json_response([{"output_ids": [1]}] if body is None else body, status=status)

    return handler


async def reset(request):
    request.transport.abort()
    return web.Response()


async def truncated(request):
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'[{"output_ids": [1]}')
    request.transport.abort()
    return response


async def hang(request):
    await asyncio.sleep(60)


async def not_json(request):
    return web.Response(text="[{", content_type="application/json")


async def generate(server, retries=3, **options):
    async with SGLangClient(server.url, retries=retries, **options) as client:
        return await client.generate([[1, 2]], [{"max_new_tokens": 1}])


async def test_sends_ids_and_asks_for_log_probs(misbehaving):
    misbehaving.script = [answers()]
    assert await generate(misbehaving) == [{"output_ids": [1]}]
    assert misbehaving.seen == [
        {"input_ids": [[1, 2]], "sampling_params": [{"max_new_tokens": 1}], "return_logprob": True}
    ]


@pytest.mark.parametrize("fault", [answers(500, {"error": "busy"}), answers(503, {}), reset, truncated, not_json])
async def test_passing_faults_are_retried(misbehaving, fault):
    misbehaving.script = [fault, fault, answers()]
    assert await generate(misbehaving) == [{"output_ids": [1]}]
    assert len(misbehaving.seen) == 3


async def test_retries_are_bounded_and_counted(misbehaving):
    misbehaving.script = [answers(500, {"error": "x" * 2000})]
    with pytest.raises(SGLangError, match="HTTP 500 after 3 attempts") as caught:
        await generate(misbehaving, retries=2)
    assert len(misbehaving.seen) == 3
    assert caught.value.status == 500
    assert caught.value.url == misbehaving.url + "/generate"
    assert len(caught.value.body) == 500


async def test_error_body_that_looks_like_a_reply_is_an_error(misbehaving):
    misbehaving.script = [answers(500)]
    with pytest.raises(SGLangError, match="HTTP 500"):
        await generate(misbehaving, retries=0)


async def test_our_own_mistake_is_not_retried(misbehaving):
    misbehaving.script = [answers(400, {"error": "too long"}), answers()]
    with pytest.raises(SGLangError, match="HTTP 400 after 1 attempt: .*too long"):
        await generate(misbehaving)


async def test_hang_is_bounded(misbehaving):
    misbehaving.script = [hang]
    start = time.monotonic()
    with pytest.raises(SGLangError, match="nothing within 0.3 s"):
        await generate(misbehaving, request_timeout=0.3)
    assert time.monotonic() - start < 5
    assert len(misbehaving.seen) == 1


async def test_nobody_listens(unused_tcp_port):
    async with SGLangClient(f"http://127.0.0.1:{unused_tcp_port}", retries=1) as client:
        with pytest.raises(SGLangError, match="no answer after 2 attempts"):
            await client.generate([[1]], [{}])


async def test_wrong_number_of_replies(misbehaving):
    misbehaving.script = [answers(200, [])]
    with pytest.raises(RuntimeError, match="asked for 1 samples, got 0"):
        await generate(misbehaving)


async def test_control_calls_are_sent_once(misbehaving):
    misbehaving.script = [answers(500, {}), answers(200, {"success": True})]
    async with SGLangClient(misbehaving.url) as client:
        with pytest.raises(SGLangError, match="HTTP 500"):
            await client.update_weight_version("3")
        await client.update_weight_version("3")
    assert misbehaving.seen == [{"new_version": "3", "abort_all_requests": False}] * 2


async def test_update_that_says_no_raises(misbehaving):
    misbehaving.script = [answers(200, {"success": False, "message": "no such group"})]
    async with SGLangClient(misbehaving.url) as client:
        with pytest.raises(SGLangError, match="no such group"):
            await client.update_weights_from_tensor(["abc"], load_format="flattened_bucket", weight_version="1")


async def test_an_error_survives_the_way_to_the_driver(misbehaving):
    misbehaving.script = [answers(500, {"error": "busy"})]
    with pytest.raises(SGLangError) as caught:
        await generate(misbehaving, retries=1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and vars(copy) == vars(caught.value)


async def test_tags_of_memory_are_named(misbehaving):
    misbehaving.script = [answers(200, None)]
    async with SGLangClient(misbehaving.url) as client:
        await client.release_memory_occupation(["kv_cache", "cuda_graph"])
        await client.resume_memory_occupation(("weights",))
    assert misbehaving.seen == [{"tags": ["kv_cache", "cuda_graph"]}, {"tags": ["weights"]}]


async def test_proxy_settings_are_ignored(misbehaving, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    misbehaving.script = [answers()]
    assert await generate(misbehaving, retries=0)


def test_one_client_in_several_loops(engine_server):
    client = SGLangClient(engine_server)

    async def version():
        async with client:
            return (await client.model_info())["weight_version"]

    assert asyncio.run(version()) == asyncio.run(version())


async def test_control_calls_on_a_real_server(engine_server):
    async with SGLangClient(engine_server) as client:
        await client.health()
        before = (await client.model_info())["weight_version"]
        await client.update_weight_version("7")
        (reply,) = await client.generate([[65]], [{"max_new_tokens": 1}])
        assert reply["meta_info"]["weight_version"] == "7"
        await client.update_weight_version(before)
        await client.flush_cache()
        for mode in ("in_place", "retract", "abort"):
            await client.pause(mode)
            await client.continue_()


async def test_abort_ends_running_requests(engine_server):
    async with SGLangClient(engine_server) as client:
        parameters = {"max_new_tokens": 400, "ignore_eos": True}
        request = asyncio.create_task(client.generate([[65], [66]], [parameters] * 2))
        await asyncio.sleep(0.3)
        await client.abort()
        replies = await asyncio.wait_for(request, 20)
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["abort", "abort"]
