import asyncio
import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import miles.rollout.engine_pool as engine_pool
from miles.engines.client import SGLangClient
from miles.rollout.engine_pool import EnginePool, RequestFailed
from miles.rollout.slots import Slots
from miles.utils.arguments import parse_args
from miles.utils.types import Sample
from tests.fast.backends.sglang_utils.misbehaving import (
    MisbehavingServer,
    answer_of,
    good,
    writes,
)
from tests.fast.rollout.engines import END, Engines, all_live, make_group

Status = Sample.Status


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


# On a real engine


@pytest.fixture
def long_config(engine_config):
    """Responses of 400 tokens at most: a quarter of a second."""
    return engine_config.model_copy(update={"rollout_max_response_len": 400, "rollout_max_context_len": None})


async def test_ids_in_ids_out_and_log_probs_of_transformers(engine_config, engine_server, tokenizer, tiny_checkpoint):
    config = engine_config.model_copy(update={"rollout_temperature": 0.7, "rollout_max_response_len": 20})
    async with Engines(config, tokenizer, engine_server) as engines:
        samples = await engines.complete(*(make_group(4, group_index=g) for g in range(3)))
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    for sample in samples:
        sample.validate()
        assert sample.tokens[:4] == [97, 98, 99, sample.group_index]
        assert sample.loss_mask == [1] * sample.response_length
        assert len(sample.weight_versions) == 1 and sample.weight_version_lengths == [sample.response_length]
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, 3:-1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[4:])[:, None])[:, 0]
        assert (torch.tensor(sample.rollout_log_probs) - expected).abs().max() < 1e-4
    responses = [tuple(sample.tokens[4:]) for sample in samples]
    assert len(set(responses)) == len(responses), "members of a group must differ"


async def test_finish_reasons(engine_config, engine_server, tokenizer):
    config = engine_config.model_copy(update={"rollout_max_response_len": 60, "rollout_max_context_len": None})
    async with Engines(config, tokenizer, engine_server) as engines:
        samples = await engines.complete(*(make_group(8, group_index=g) for g in range(16)))
        assert {sample.status for sample in samples} == {Status.COMPLETED, Status.TRUNCATED}
        for sample in samples:
            response = sample.tokens[4:]
            completed = sample.status is Status.COMPLETED
            assert (response[-1] == END) == completed
            assert END not in response[:-1]
            assert sample.response_length == 60 or completed
            assert sample.response == tokenizer.decode(response[:-1] if completed else response)

        # The end token at the limit is an end, too.
        ended = [sample for sample in samples if sample.status is Status.COMPLETED]
        likeliest = max(ended, key=lambda sample: sample.rollout_log_probs[-1])
        group = [Sample(group_index=0, index=i, tokens=likeliest.tokens[:-1]) for i in range(1000)]
        for sample in await engines.complete(group, max_new_tokens=1):
            if sample.tokens[-1] == END:
                assert sample.status is Status.COMPLETED and sample.response == ""
            else:
                assert sample.status is Status.TRUNCATED
        assert any(sample.tokens[-1] == END for sample in group)


async def test_stop_texts_and_ids(long_config, engine_server, tokenizer):
    async with Engines(long_config, tokenizer, engine_server) as engines:
        for sample in await engines.complete(make_group(8), stop_token_ids=list(range(100, 130))):
            assert sample.tokens[-1] in (*range(100, 130), END)
            assert sample.response == tokenizer.decode(sample.tokens[4:], skip_special_tokens=True)
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        samples = await engines.complete(make_group(8), stop=list(letters))
        stopped = [sample for sample in samples if sample.tokens[-1] != END]
        assert stopped
        for sample in stopped:
            assert chr(sample.tokens[-1]) in letters
            assert sample.response == tokenizer.decode(sample.tokens[4:])


async def running(control, count):
    """Return once the engine has so many requests, waiting ones too."""
    while await control.running_requests() < count:
        await asyncio.sleep(0.01)


async def idle(control):
    """Fail unless the engine has no requests, of which its own report is late."""
    async with asyncio.timeout(1):
        while await control.running_requests():
            await asyncio.sleep(0.01)


async def test_what_is_cut_off_goes_on_as_if_it_had_not_been(engine_config, engine_server, tokenizer):
    """140 requests, of which the engine runs 128 at a time, are cut off and go on with other weights' version."""
    config = engine_config.model_copy(update={"rollout_max_response_len": 100, "rollout_max_context_len": None})
    groups = [make_group(14, group_index=g) for g in range(10)]
    expected = copy.deepcopy(groups)
    async with Engines(config, tokenizer, engine_server) as engines, SGLangClient(engine_server) as control:
        before = (await control.model_info())["weight_version"]
        await control.update_weight_version("7")
        expected = await engines.complete(*expected, ignore_eos=True)
        work = asyncio.create_task(engines.complete(*groups, ignore_eos=True))
        await running(control, 140)
        assert engines.pool.in_flight == 140
        await engines.pool.hold()
        assert engines.pool.in_flight == 0
        first = copy.deepcopy(await work)
        await idle(control)
        await control.update_weight_version("8")
        engines.pool.release()
        second = await engines.complete(*groups, ignore_eos=True)
        await control.update_weight_version(before)
    assert {sample.status for sample in first} == {Status.ABORTED}
    assert {sample.response_length == 0 for sample in first} == {True, False}, "some ran and some waited"
    for whole, part, sample in zip(expected, first, second, strict=True):
        part.validate()
        assert part.weight_versions == ["7"] * (part.response_length > 0)
        assert part.tokens == whole.tokens[: len(part.tokens)]
        assert part.response == tokenizer.decode(part.tokens[4:])
        sample.validate()
        assert (sample.tokens, sample.response, sample.loss_mask) == (whole.tokens, whole.response, whole.loss_mask)
        assert sample.status is Status.TRUNCATED and sample.response_length == 100
        assert sample.rollout_log_probs == pytest.approx(whole.rollout_log_probs, abs=1e-4)
        assert sample.rollout_log_probs[: part.response_length] == (part.rollout_log_probs or [])
        assert sample.weight_versions == [*part.weight_versions, "8"]
        assert sample.weight_version_lengths[-1] == 100 - part.response_length
        assert sum(sample.weight_version_lengths) == 100


@pytest.mark.slow
async def test_any_number_of_cuts_at_any_time(engine_config, engine_server, tokenizer):
    """Groups that wait for the release and go on, while the pool is held again and again."""
    config = engine_config.model_copy(update={"rollout_max_response_len": 100, "rollout_max_context_len": None})
    groups = [make_group(4, group_index=g) for g in range(60)]
    async with Engines(config, tokenizer, engine_server, limit=160) as engines, SGLangClient(engine_server) as control:
        before = (await control.model_info())["weight_version"]
        expected = await engines.complete(*copy.deepcopy(groups))
        await control.update_weight_version("0")

        async def finish(group):
            while unfinished := [s for s in group if s.status in (Status.PENDING, Status.ABORTED)]:
                await engines.complete(unfinished)
                await engines.pool.wait_released()

        work = [asyncio.create_task(finish(group)) for group in groups]
        version = 0
        while not all(task.done() for task in work):
            await asyncio.sleep(0.05 * (version % 4))
            await engines.pool.hold()
            version += 1
            await control.update_weight_version(str(version))
            engines.pool.release()
        await asyncio.gather(*work)
        await control.update_weight_version(before)
    assert version > 5
    for whole, sample in zip(expected, [sample for group in groups for sample in group], strict=True):
        sample.validate()
        assert (sample.tokens, sample.response, sample.status) == (whole.tokens, whole.response, whole.status)
        assert sample.rollout_log_probs == pytest.approx(whole.rollout_log_probs, abs=1e-4)
        assert sum(sample.weight_version_lengths) == sample.response_length
        assert sample.weight_versions == sorted(set(sample.weight_versions), key=int), "one entry a version, in order"


async def test_hold_overtakes_a_request(long_config, engine_server, tokenizer):
    async with Engines(long_config, tokenizer, engine_server) as engines, SGLangClient(engine_server) as control:
        for wait in range(8):
            (group,) = [make_group(3)]
            work = asyncio.create_task(engines.complete(group, ignore_eos=True))
            for _ in range(wait):
                await asyncio.sleep(0)
            await asyncio.wait_for(engines.pool.hold(), 10)
            assert {sample.status for sample in await work} == {Status.ABORTED}
            await idle(control)
            engines.pool.release()


async def test_held_sends_nothing(long_config, engine_server, tokenizer):
    async with Engines(long_config, tokenizer, engine_server) as engines:
        await engines.pool.hold()
        await engines.pool.hold()
        group = make_group(2)
        before = copy.deepcopy(group)
        for sample in before:
            sample.status = Status.ABORTED
        assert await engines.complete(group) == before
        await engines.pool.wait_held()
        waiting = asyncio.create_task(engines.pool.wait_released())
        await asyncio.sleep(0)
        assert not waiting.done()
        engines.pool.release()
        await waiting
        for sample in await engines.complete(group):
            assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert engines.pool.holds == 2


async def test_hold_ends_what_a_caller_gave_up(long_config, engine_server, tokenizer):
    """SGLang itself notices it only after seconds."""
    async with Engines(long_config, tokenizer, engine_server) as engines, SGLangClient(engine_server) as control:
        group = make_group(3)
        work = asyncio.create_task(engines.complete(group, ignore_eos=True))
        await running(control, 3)
        work.cancel()
        assert await asyncio.gather(work, return_exceptions=True) != [group]
        assert group == make_group(3) and engines.pool.in_flight == 0
        await engines.pool.hold()
        await idle(control)


async def test_a_conversation_goes_on_behind_a_tools_answer(engine_config, engine_server, tokenizer):
    async with Engines(engine_config, tokenizer, engine_server) as engines:
        (sample,) = await engines.complete(make_group(1), max_new_tokens=5, ignore_eos=True)
        first = copy.deepcopy(sample)
        sample.append_context([70, 71, 72])
        await engines.complete([sample], max_new_tokens=4, ignore_eos=True)
    sample.validate()
    assert sample.tokens[:12] == [*first.tokens, 70, 71, 72] and sample.response_length == 12
    assert sample.response == tokenizer.decode(sample.tokens[4:])
    assert sample.loss_mask == [1] * 5 + [0] * 3 + [1] * 4
    assert sample.rollout_log_probs[:8] == [*first.rollout_log_probs, 0.0, 0.0, 0.0]
    version = first.weight_versions[0]
    assert (sample.weight_versions, sample.weight_version_lengths) == ([version, version], [5, 7])
    assert sample.trained_token_versions() == [version] * 5 + [None] * 3 + [version] * 4


async def test_prompt_that_the_engine_refuses(long_config, engine_server, tokenizer):
    async with Engines(long_config, tokenizer, engine_server) as engines:
        with pytest.raises(RequestFailed, match="HTTP 400 after 1 attempt.*longer than the model's context length"):
            await engines.complete(make_group(2, tokens=[97] * 1000))
        assert engines.pool.take_metrics() == {"rollout/request_retries": 0}


# Requests


async def test_one_request_a_group_with_seeds_of_its_own(engine_config, tokenizer):
    async with MisbehavingServer(good) as server, Engines(engine_config, tokenizer, server.url) as engines:
        samples = await engines.complete(*(make_group(4, group_index=g) for g in range(3)))
        assert [len(body["input_ids"]) for body in server.seen] == [4, 4, 4]
        parameters = [p for body in server.seen for p in body["sampling_params"]]
        assert len({p["sampling_seed"] for p in parameters}) == 12
        assert all(0 <= p["sampling_seed"] < 2**63 for p in parameters)
        assert all(p["stop_token_ids"] == [END] for p in parameters)
        assert [sample.response for sample in samples] == ["AB"] * 12
        seen, server.seen = server.seen, []
        await engines.complete(*(make_group(4, group_index=g) for g in range(3)))
        assert server.seen == seen


async def test_parameters_are_not_edited(engine_config, tokenizer):
    """One dict for several calls with different ends: each has a copy of its own."""
    async with MisbehavingServer(good) as server, Engines(engine_config, tokenizer, server.url) as engines:
        shared = {"max_new_tokens": 4, "stop_token_ids": [9]}
        before = copy.deepcopy(shared)
        await asyncio.gather(*(engines.pool.complete(make_group(2), [shared] * 2) for _ in range(8)))
        assert shared == before
        assert [body["sampling_params"] for body in server.seen] == [
            [{"max_new_tokens": 4, "stop_token_ids": [9, END]}] * 2
        ] * 8


async def test_no_room_is_no_request(engine_config, tokenizer):
    async with MisbehavingServer(good) as server, Engines(engine_config, tokenizer, server.url) as engines:
        a, b = await engines.complete(make_group(2), max_new_tokens=0)
        assert (a.status, b.status, a.tokens) == (Status.TRUNCATED, Status.TRUNCATED, [97, 98, 99, 0])
        assert server.seen == []
        group = [Sample(tokens=[1, 2], response_length=1)]
        with pytest.raises(ValueError, match="a response without rollout_log_probs"):
            await engines.complete(group)


@pytest.mark.parametrize(("stop", "response"), [("BC", "ABC"), (["E", "B"], "AB"), ("CB", "ABCD"), (None, "ABCD")])
async def test_the_text_ends_with_what_stops_it(engine_config, tokenizer, stop, response):
    async with MisbehavingServer(writes(65, 66, 67, 68)) as server:
        async with Engines(engine_config, tokenizer, server.url) as engines:
            (sample,) = await engines.complete(make_group(1), stop=stop)
    assert sample.response == response and sample.response_length == 4
    assert sample.status is (Status.TRUNCATED if response == "ABCD" else Status.COMPLETED)


async def test_a_character_that_was_cut_in_two(engine_config, tokenizer):
    """The euro sign is three bytes, each a token; a stop text ends the response behind it."""
    async with MisbehavingServer(writes(65, 0xE2, 0x82), writes(0xAC, 66, 67)) as server:
        async with Engines(engine_config, tokenizer, server.url) as engines:
            (sample,) = await engines.complete(make_group(1))
            await engines.complete([sample], stop=["B"])
    assert sample.response == "A\u20acB"
    assert sample.status is Status.COMPLETED
    assert sample.tokens == [97, 98, 99, 0, 65, 0xE2, 0x82, 0xAC, 66, 67]


class FakeClient:
    """Answers at the end of a short time, and counts samples in flight."""

    url = "http://fake"

    def __init__(self):
        self.requests, self.in_flight, self.most_in_flight = [], 0, 0

    async def generate(self, input_ids, sampling_params):
        self.requests.append(input_ids)
        self.in_flight += len(input_ids)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.01)
        self.in_flight -= len(input_ids)
        return [answer_of([65])] * len(input_ids)


async def test_concurrency_limit_and_balance(engine_flags, tokenizer):
    config = parse_args([*engine_flags, "--sglang-server-concurrency", "8"])

    async def most(num_groups, size, *clients):
        pool = EnginePool(config, clients, config.sglang_server_concurrency, tokenizer, all_live)
        groups = [make_group(size, group_index=g) for g in range(num_groups)]
        await asyncio.gather(*(pool.complete(group, [{"max_new_tokens": 1}] * size) for group in groups))
        return [client.most_in_flight for client in clients]

    clients = [FakeClient(), FakeClient()]
    assert await most(20, 4, *clients) == [8, 8]
    assert [len(client.requests) for client in clients] == [10, 10]
    assert [ids[0][-1] for client in clients for ids in client.requests[:2]] == [0, 2, 1, 3], "in order"
    assert await most(3, 10, FakeClient()) == [10]


async def test_a_waiting_request_that_is_cancelled_frees_its_place(engine_config, tokenizer):
    client = FakeClient()
    pool = EnginePool(engine_config, [client], 2, tokenizer, all_live)
    tasks = [asyncio.create_task(pool.complete(make_group(2), [{"max_new_tokens": 1}] * 2)) for _ in range(6)]
    await asyncio.sleep(0)
    for task in (tasks[0], tasks[1], tasks[3]):
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert [result is None for result in results] == [False, False, True, False, True, True]
    assert pool.in_flight == 0
    await asyncio.wait_for(pool.complete(make_group(2), [{"max_new_tokens": 1}] * 2), 5)


async def test_a_server_given_to_a_request_that_is_cancelled_is_free_again():
    one = Slots([FakeClient()], 2)
    async with one.take(2):
        waiting = asyncio.create_task(hold_a_slot(one, 2))
        await asyncio.sleep(0)
    waiting.cancel()  # it has the server, and has not run since
    assert await asyncio.gather(waiting, return_exceptions=True) != [None]
    await asyncio.wait_for(hold_a_slot(one, 2), 1)


async def test_those_behind_a_cancelled_request_are_served():
    one = Slots([FakeClient()], 4)
    async with one.take(2):
        too_large, fits = (asyncio.create_task(hold_a_slot(one, count)) for count in (4, 2))
        await asyncio.sleep(0)
        assert not fits.done()
        too_large.cancel()
        await asyncio.wait_for(fits, 1)


async def hold_a_slot(servers, count):
    async with servers.take(count):
        pass


# The pool of a context


async def test_the_pool_of_a_context(engine_config, tokenizer):
    pools = [EnginePool(engine_config, [FakeClient()], 2, tokenizer, all_live) for _ in range(2)]
    with pytest.raises(RuntimeError, match="no engines here"):
        engine_pool.current()

    async def user(pool, stop):
        with pool.active(stop):
            await asyncio.sleep(0)
            return await asyncio.create_task(inside())

    async def inside():
        return engine_pool.current(), engine_pool.stopping()()

    found = await asyncio.gather(user(pools[0], None), user(pools[1], lambda: True))
    assert found == [(pools[0], False), (pools[1], True)]
    with pytest.raises(RuntimeError, match="no engines here"):
        engine_pool.current()
