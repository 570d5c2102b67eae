import asyncio

import pytest
from transformers import AutoTokenizer

import miles.rollout.engine_pool as engine_pool
import miles.rollout.slots as slots
from miles.engines.client import SGLangClient
from miles.rollout.engine_pool import EnginePool, EnginesLost, RequestFailed
from miles.utils.types import Sample
from tests.fast.backends.sglang_utils.misbehaving import (
    MisbehavingServer,
    answer_of,
    cut_off,
    good,
    hangs,
    not_json,
    one_too_few,
    reset,
    says,
    slow,
    truncated,
    writes,
)
from tests.fast.rollout.engines import Engines, make_group

Status = Sample.Status


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(engine_pool, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(engine_pool, "END_SECONDS", 0.3)
    monkeypatch.setattr(engine_pool, "END_POLL_SECONDS", 0.02)


# On a server that misbehaves


@pytest.mark.parametrize(
    "fault",
    [
        says(500, {"error": "busy"}),
        says(503, [answer_of([65])] * 2),
        says(body={"output_ids": [65]}),
        says(body=[None, None]),
        says(body=[{"output_ids": [65]}] * 2),
        says(body=[{"output_ids": [65], "meta_info": {"finish_reason": None}}] * 2),
        writes(),
        writes(65, 66, log_probs=[-0.1]),
        writes(65, 66, log_probs=[-0.1, None]),
        writes(65, reason="tired"),
        writes(65, reason="abort"),
        reset,
        truncated,
        not_json,
        one_too_few,
        hangs,
    ],
)
async def test_passing_faults_are_asked_again(engine_config, tokenizer, fault):
    async with MisbehavingServer(fault, fault, good) as server:
        async with Engines(engine_config, tokenizer, server.url, request_timeout=0.3) as engines:
            samples = await engines.complete(make_group(2))
            assert [sample.response for sample in samples] == ["AB", "AB"]
            assert [sample.weight_versions for sample in samples] == [["1"], ["1"]]
            assert server.seen == [server.seen[0]] * 3
            assert engines.pool.take_metrics() == {"rollout/request_retries": 2}
            assert engines.pool.take_metrics() == {"rollout/request_retries": 0}


async def test_what_is_slow_is_waited_for(engine_config, tokenizer, monkeypatch):
    monkeypatch.setattr(engine_pool, "WATCH_SECONDS", 0.05)
    async with MisbehavingServer(slow) as server, Engines(engine_config, tokenizer, server.url) as engines:
        await engines.complete(make_group(2))
        assert len(server.seen) == 1
        assert engines.pool.take_metrics() == {"rollout/request_retries": 0}


@pytest.mark.parametrize(("fault", "said"), [(says(500, "no"), "HTTP 500"), (writes(65, reason="abort"), "aborted")])
async def test_retries_are_bounded(engine_config, tokenizer, fault, said, caplog):
    async with MisbehavingServer(fault) as server, Engines(engine_config, tokenizer, server.url) as engines:
        group = make_group(2)
        with pytest.raises(RequestFailed, match=rf"sample\(s\) \[0, 1\] of group 0: .* in 4 requests .*{said}"):
            await engines.complete(group)
        assert len(server.seen) == 4
        assert group == make_group(2)
        assert engines.pool.in_flight == 0
        assert len(caplog.records) == 1, "one line, however often it fails"


async def test_each_bad_time_has_a_line(engine_config, tokenizer, caplog):
    async with MisbehavingServer(reset, reset, good, reset, good) as server:
        async with Engines(engine_config, tokenizer, server.url) as engines:
            await engines.complete(make_group(2))
            await engines.complete(make_group(2))
            assert [f"{server.url}: it fails requests, which are" in r.message for r in caplog.records] == [True] * 2


async def test_a_refused_request_is_not_sent_again(engine_config, tokenizer):
    async with MisbehavingServer(says(400, "too long"), good) as server:
        async with Engines(engine_config, tokenizer, server.url) as engines:
            with pytest.raises(RequestFailed, match="HTTP 400.*too long"):
                await engines.complete(make_group(2))
            assert len(server.seen) == 1


async def test_only_the_sample_without_an_answer_is_asked_again(engine_config, tokenizer):
    async def one_aborted(request):
        replies = [answer_of([66])] * 2 + [answer_of([65], reason="abort"), answer_of([66])]
        return await says(body=replies)(request)

    async with MisbehavingServer(one_aborted, writes(67)) as server:
        async with Engines(engine_config, tokenizer, server.url) as engines:
            samples = await engines.complete(make_group(4))
    assert [len(body["input_ids"]) for body in server.seen] == [4, 1]
    assert server.seen[1]["sampling_params"][0] == server.seen[0]["sampling_params"][2]
    assert [sample.response for sample in samples] == ["B", "B", "C", "B"]
    assert [len(sample.weight_versions) for sample in samples] == [1, 1, 1, 1]


async def test_samples_with_an_answer_keep_it_when_others_fail(engine_config, tokenizer):
    async def half(request):
        replies = [answer_of([66]), answer_of([])]
        return await says(body=replies[-len((await request.json())["input_ids"]) :])(request)

    async with MisbehavingServer(half) as server, Engines(engine_config, tokenizer, server.url) as engines:
        group = make_group(2)
        with pytest.raises(RequestFailed, match=r"sample\(s\) \[1\]"):
            await engines.complete(group)
    assert [sample.status for sample in group] == [Status.TRUNCATED, Status.PENDING]
    assert [sample.response for sample in group] == ["B", ""]


async def test_a_failing_engine_is_left_alone_but_for_one_request_now_and_then(engine_config, tokenizer, monkeypatch):
    """It would always be the least loaded."""
    monkeypatch.setattr(engine_pool, "BACKOFF_SECONDS", 60.0)
    monkeypatch.setattr(slots, "SHUN_SECONDS", 60.0)
    async with MisbehavingServer(says(500), says(500), good) as bad, MisbehavingServer(good) as well:
        async with Engines(engine_config, tokenizer, bad.url, well.url) as engines:

            async def ten_groups():
                await asyncio.wait_for(engines.complete(*(make_group(2, group_index=g) for g in range(10))), 10)

            def time_passes():
                engines.pool._slots._shunned[engines.clients[0]] = 0.0

            await engines.complete(make_group(2))
            await ten_groups()
            assert (len(bad.seen), len(well.seen)) == (1, 11)
            time_passes()
            await ten_groups()
            assert (len(bad.seen), len(well.seen)) == (2, 21)
            assert engines.pool.take_metrics() == {"rollout/request_retries": 2}
            time_passes()
            await engines.complete(make_group(2))
            await ten_groups()
            assert (len(bad.seen), len(well.seen)) == (3 + 5, 21 + 5)
            assert engines.pool.take_metrics() == {"rollout/request_retries": 0}


async def test_a_dead_engine_leaves_and_its_requests_go_to_the_others(engine_config, tokenizer, caplog):
    async with MisbehavingServer(good) as well:
        async with MisbehavingServer(hangs) as dying:
            engines = Engines(engine_config, tokenizer, dying.url, well.url)
            work = asyncio.create_task(engines.complete(*(make_group(2, group_index=g) for g in range(10))))
            await dying.arrived.wait()
            engines.out = {engines.clients[0]: RuntimeError("exit code -9")}
        async with engines:
            samples = await work
            assert [sample.response for sample in samples] == ["AB"] * 20
            requests = len(dying.seen)
            assert len(well.seen) == 10 and requests > 0
            assert engines.pool.take_metrics() == {"rollout/request_retries": requests}
            await engines.complete(*(make_group(2, group_index=g) for g in range(10)))
            assert len(well.seen) == 20
            await engines.pool.hold()
            assert well.aborts == 1
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "exit code -9" in record.message and dying.url in record.message


async def test_an_engine_that_dies_without_a_word(engine_config, tokenizer, monkeypatch):
    """A lost host closes no connection."""
    monkeypatch.setattr(engine_pool, "WATCH_SECONDS", 0.05)
    async with MisbehavingServer(hangs) as dying, MisbehavingServer(good) as well:
        async with Engines(engine_config, tokenizer, dying.url, well.url) as engines:
            work = asyncio.create_task(engines.complete(make_group(2)))
            await dying.arrived.wait()
            engines.out = {engines.clients[0]: RuntimeError("node lost")}
            assert [sample.response for sample in await asyncio.wait_for(work, 5)] == ["AB"] * 2


async def test_an_engine_that_is_out_for_a_while_is_taken_back(engine_config, tokenizer, monkeypatch, caplog):
    """It stands still with a request, which another gets; later it has its share again."""
    monkeypatch.setattr(engine_pool, "WATCH_SECONDS", 0.05)
    async with MisbehavingServer(hangs, good) as hung, MisbehavingServer(good) as well:
        async with Engines(engine_config, tokenizer, hung.url, well.url) as engines:
            work = asyncio.create_task(engines.complete(make_group(2)))
            await hung.arrived.wait()
            engines.out = {engines.clients[0]: RuntimeError("it has not answered for 30 s")}
            assert [sample.response for sample in await asyncio.wait_for(work, 5)] == ["AB"] * 2
            await engines.pool.hold()
            assert (hung.aborts, well.aborts) == (0, 1)
            engines.pool.release()
            engines.out = {}
            await engines.pool._check()
            await engines.complete(*(make_group(2, group_index=g) for g in range(10)))
            assert (len(hung.seen), len(well.seen)) == (1 + 5, 1 + 5)
            assert engines.pool._slots._load == dict.fromkeys(engines.clients, 0)
    said = [record.message for record in caplog.records]
    assert said[0] == f"{hung.url} gets no more requests: it has not answered for 30 s"
    assert said[1:] == [f"{hung.url} gets requests again"]


async def test_a_look_at_the_engines_that_takes_long_delays_nobody(engine_config, tokenizer, monkeypatch):
    monkeypatch.setattr(engine_pool, "WATCH_SECONDS", 0.05)
    async with MisbehavingServer(slow) as server, Engines(engine_config, tokenizer, server.url) as engines:
        engines.pool._check_engines = lambda: asyncio.sleep(600)
        samples = await asyncio.wait_for(engines.complete(make_group(2)), 5)
        assert [sample.response for sample in samples] == ["AB"] * 2
        engines.pool._checking.cancel()


async def test_the_end_of_a_server_is_waited_for_before_its_last_request_counts_as_failed(engine_config, tokenizer):
    config = engine_config.model_copy(update={"rollout_request_retries": 0})
    async with MisbehavingServer(reset) as server, Engines(config, tokenizer, server.url) as engines:
        looks = []

        async def check():
            looks.append(1)
            return {engines.clients[0]: RuntimeError("Last lines of engine_0.log")} if len(looks) > 2 else {}

        engines.pool._check_engines = check
        with pytest.raises(EnginesLost, match="Last lines of engine_0.log"):
            await engines.complete(make_group(2))


async def test_no_engine_left(engine_config, tokenizer, unused_tcp_port):
    async with Engines(engine_config, tokenizer, f"http://127.0.0.1:{unused_tcp_port}", limit=2) as engines:
        engines.out = {engines.clients[0]: RuntimeError("log tail")}
        work = [engines.complete(make_group(2, group_index=g)) for g in range(3)]
        errors = await asyncio.gather(*work, return_exceptions=True)
        assert [type(error) for error in errors] == [EnginesLost] * 3
        with pytest.raises(EnginesLost, match="no engine is left; http://127.0.0.1:.*log tail"):
            await engines.complete(make_group(1))


async def test_a_router_is_lost_with_its_last_engine(engine_config, tokenizer):
    async with MisbehavingServer(says(503)) as router:
        client, behind = SGLangClient(router.url), [SGLangClient("http://a"), SGLangClient("http://b")]
        dead = dict.fromkeys(behind, RuntimeError("log tail"))

        async def check():
            return dead

        pool = EnginePool(engine_config, [client], 8, tokenizer, check, engines=behind)
        with pytest.raises(EnginesLost, match="log tail"):
            await pool.complete(make_group(1), [{"max_new_tokens": 1}])
        await client.close()


# Holding a server that misbehaves


@pytest.mark.parametrize("retries", [3, 0])
async def test_while_held_a_failure_is_no_reason_to_ask_again(engine_config, tokenizer, retries):
    config = engine_config.model_copy(update={"rollout_request_retries": retries})

    async def fails_when_aborted(request):
        await asyncio.wait_for(servers[0].aborted.wait(), 5)
        return await says(503)(request)

    async with (
        MisbehavingServer(fails_when_aborted) as server,
        Engines(config, tokenizer, server.url) as engines,
    ):
        servers = [server]
        group = make_group(2)
        work = asyncio.create_task(engines.complete(group))
        await server.arrived.wait()
        await engines.pool.hold()
        assert [sample.status for sample in await work] == [Status.ABORTED] * 2
        assert [sample.tokens for sample in group] == [sample.tokens for sample in make_group(2)]
        assert len(server.seen) == 1


async def test_hold_ends_waiting_for_a_slot(engine_config, tokenizer):
    async with MisbehavingServer(cut_off) as server, Engines(engine_config, tokenizer, server.url, limit=2) as engines:
        groups = [make_group(2, group_index=g) for g in range(6)]
        work = asyncio.create_task(engines.complete(*groups))
        await server.arrived.wait()
        assert engines.pool.in_flight == 12
        await asyncio.wait_for(engines.pool.hold(), 5)
        samples = await work
    assert {sample.status for sample in samples} == {Status.ABORTED}
    assert sum(sample.response_length for sample in samples) == 2
    assert len(server.seen) == 1


async def test_hold_ends_waiting_between_attempts(engine_config, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(engine_pool, "BACKOFF_SECONDS", 60.0)
    async with MisbehavingServer(says(500)) as server, Engines(engine_config, tokenizer, server.url) as engines:
        work = asyncio.create_task(engines.complete(make_group(2)))
        while not caplog.records:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engines.pool.hold(), 5)
        assert {sample.status for sample in await work} == {Status.ABORTED}


async def test_an_abort_at_the_end_of_the_budget_or_of_the_response(engine_config, tokenizer):
    async with MisbehavingServer(cut_off) as server, Engines(engine_config, tokenizer, server.url) as engines:
        groups = [make_group(1, group_index=g) for g in range(2)]
        work = [engines.complete(groups[0], max_new_tokens=1), engines.complete(groups[1], stop_token_ids=[65])]
        tasks = [asyncio.create_task(each) for each in work]
        while len(server.seen) < 2:
            await asyncio.sleep(0.01)
        await engines.pool.hold()
        (truncated_,), (completed,) = await asyncio.gather(*tasks)
        assert (truncated_.status, truncated_.response) == (Status.TRUNCATED, "A")
        assert (completed.status, completed.response) == (Status.COMPLETED, "A")
        engines.pool.release()


async def test_hold_is_bounded(engine_config, tokenizer, monkeypatch):
    monkeypatch.setattr(engine_pool, "HOLD_SECONDS", 0.3)
    async with MisbehavingServer(hangs) as server, Engines(engine_config, tokenizer, server.url) as engines:
        work = asyncio.create_task(engines.complete(make_group(2)))
        await server.arrived.wait()
        engines.silent = {engines.clients[0]: "has not answered its health check for 90 s"}
        with pytest.raises(RuntimeError) as caught:
            await engines.pool.hold()
        assert str(caught.value) == (
            f"2 samples are still in flight 0.3 s after all requests were to be aborted: 2 at {server.url}; "
            f"{server.url} has not answered its health check for 90 s"
        )
        assert server.aborts > 1
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
