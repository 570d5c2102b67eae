import asyncio
import pickle
import time

import pytest

import miles.engines.client as client_module
from miles.engines.client import SGLangClient, SGLangError
from tests.fast.backends.sglang_utils.misbehaving import MisbehavingServer, hangs, not_json, reset, says, truncated


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", 0.01)


@pytest.fixture
async def misbehaving():
    async with MisbehavingServer() as server:
        yield server


GOOD = [{"output_ids": [1]}]


async def generate(server, **options):
    async with SGLangClient(server.url, **options) as client:
        return await client.generate([[1, 2]], [{"max_new_tokens": 1}])


async def score(server, retries=3):
    async with SGLangClient(server.url, retries=retries) as client:
        return await client.score([[1, 2]], [0])


async def test_sends_ids_and_asks_for_log_probs(misbehaving):
    misbehaving.script = [says(body=GOOD)]
    assert await generate(misbehaving) == GOOD
    assert misbehaving.seen == [
        {"input_ids": [[1, 2]], "sampling_params": [{"max_new_tokens": 1}], "return_logprob": True}
    ]


FAULTS = [says(500, {"error": "busy"}), says(503, {}), reset, truncated, not_json]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_score_is_asked_for_again(misbehaving, fault):
    misbehaving.script = [fault, fault, says(body=GOOD)]
    assert await score(misbehaving) == GOOD
    assert len(misbehaving.seen) == 3


@pytest.mark.parametrize("fault", FAULTS)
async def test_generating_is_asked_for_once(misbehaving, fault):
    misbehaving.script = [fault, says(body=GOOD)]
    with pytest.raises(SGLangError, match="after 1 attempt:") as caught:
        await generate(misbehaving)
    assert not caught.value.refused
    assert len(misbehaving.seen) == 1


async def test_retries_are_bounded_and_counted(misbehaving):
    misbehaving.script = [says(500, {"error": "x" * 2000})]
    with pytest.raises(SGLangError, match="HTTP 500 after 3 attempts") as caught:
        await score(misbehaving, retries=2)
    assert len(misbehaving.seen) == 3
    assert caught.value.status == 500
    assert caught.value.url == misbehaving.url + "/generate"
    assert len(caught.value.body) == 500


async def test_error_body_that_looks_like_a_reply_is_an_error(misbehaving):
    misbehaving.script = [says(500, GOOD)]
    with pytest.raises(SGLangError, match="HTTP 500"):
        await generate(misbehaving)


async def test_our_own_mistake_is_not_retried(misbehaving):
    misbehaving.script = [says(400, {"error": "too long"}), says(body=GOOD)]
    with pytest.raises(SGLangError, match="HTTP 400 after 1 attempt: .*too long") as caught:
        await score(misbehaving)
    assert caught.value.refused


async def test_hang_is_bounded(misbehaving):
    misbehaving.script = [hangs]
    start = time.monotonic()
    with pytest.raises(SGLangError, match="nothing within 0.3 s"):
        await generate(misbehaving, request_timeout=0.3)
    assert time.monotonic() - start < 5
    assert len(misbehaving.seen) == 1


async def test_what_reads_all_weights_has_a_limit_of_its_own(misbehaving, monkeypatch):
    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_SECONDS", 0.05)

    async def loads(request):
        await asyncio.sleep(0.3)
        return await says(body={"success": True, "ranks": []})(request)

    misbehaving.script = [loads]
    calls = [lambda c: c.update_weights_from_disk("/f"), SGLangClient.weight_checksums, SGLangClient.reset_weights]
    async with SGLangClient(misbehaving.url, load_timeout=20.0) as client:
        await asyncio.gather(*(call(client) for call in calls))
    async with SGLangClient(misbehaving.url, load_timeout=0.1) as client:
        with pytest.raises(SGLangError, match="update_weights_from_disk: .* nothing within 0.1 s"):
            await client.update_weights_from_disk("/f")


@pytest.mark.parametrize("fault", [says(503), says(500), says(body={}), hangs])
async def test_who_answers_anything_or_late_is_there(misbehaving, monkeypatch, fault):
    monkeypatch.setattr(client_module, "CONNECT_SECONDS", 0.2)
    misbehaving.script = [reset, reset, fault]
    async with SGLangClient(misbehaving.url) as client:
        await client.require_reachable()


async def test_who_takes_no_connection_several_times_is_not(unused_tcp_port, misbehaving):
    misbehaving.script = [reset]
    for url in (misbehaving.url, f"http://127.0.0.1:{unused_tcp_port}"):
        async with SGLangClient(url) as client:
            with pytest.raises(SGLangError, match="no answer"):
                await client.require_reachable()


async def test_nobody_listens(unused_tcp_port):
    async with SGLangClient(f"http://127.0.0.1:{unused_tcp_port}", retries=1) as client:
        with pytest.raises(SGLangError, match="no answer after 2 attempts"):
            await client.score([[1]], [0])


@pytest.mark.parametrize(("body", "got"), [([], "got 0 samples"), ({"output_ids": [1]}, "got {'output_ids'")])
async def test_wrong_number_of_replies(misbehaving, body, got):
    misbehaving.script = [says(body=body)]
    with pytest.raises(SGLangError, match=f"asked for 1 samples, {got}") as caught:
        await generate(misbehaving)
    assert not caught.value.refused


async def test_control_calls_are_sent_once(misbehaving):
    misbehaving.script = [says(500, {}), says(200, {"success": True})]
    async with SGLangClient(misbehaving.url) as client:
        with pytest.raises(SGLangError, match="HTTP 500"):
            await client.update_weight_version("3")
        await client.update_weight_version("3")
    assert misbehaving.seen == [{"new_version": "3", "abort_all_requests": False}] * 2


async def test_update_that_says_no_raises(misbehaving):
    misbehaving.script = [says(200, {"success": False, "message": "no such group"})]
    async with SGLangClient(misbehaving.url) as client:
        with pytest.raises(SGLangError, match="no such group"):
            await client.update_weights_from_tensor(["abc"], load_format="flattened_bucket", weight_version="1")


async def test_an_error_survives_the_way_to_the_driver(misbehaving):
    misbehaving.script = [says(500, {"error": "busy"})]
    with pytest.raises(SGLangError) as caught:
        await generate(misbehaving)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and vars(copy) == vars(caught.value)


async def test_tags_of_memory_are_named(misbehaving):
    misbehaving.script = [says()]
    async with SGLangClient(misbehaving.url) as client:
        await client.release_memory_occupation(["kv_cache", "cuda_graph"])
        await client.resume_memory_occupation(("weights",))
    assert misbehaving.seen == [{"tags": ["kv_cache", "cuda_graph"]}, {"tags": ["weights"]}]


async def test_proxy_settings_are_ignored(misbehaving, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    misbehaving.script = [says(body=GOOD)]
    assert await generate(misbehaving)


async def test_a_connection_that_the_server_may_have_closed_is_not_used(misbehaving, monkeypatch):
    monkeypatch.setattr(client_module, "KEEP_ALIVE_SECONDS", 0.1)
    ports = []

    async def notes_the_port(request):
        ports.append(request.transport.get_extra_info("peername")[1])
        return await says(body=GOOD)(request)

    misbehaving.script = [notes_the_port]
    async with SGLangClient(misbehaving.url) as client:
        for idle in (0, 0, 0.3):
            await asyncio.sleep(idle)
            await client.generate([[1]], [{}])
    assert ports[0] == ports[1] != ports[2]


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


async def test_another_number_of_texts_is_refused(monkeypatch):
    async def one_text(path, body, *, timeout):
        return {"text": ["a"]}

    async with SGLangClient("http://127.0.0.1:9") as client:
        monkeypatch.setattr(client, "_control", one_text)
        with pytest.raises(SGLangError, match="asked for 2 texts, got 1"):
            await client.detokenize([[1], [2]])
