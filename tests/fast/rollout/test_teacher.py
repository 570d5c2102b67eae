import asyncio

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoModelForCausalLM, AutoTokenizer

import miles.engines.client as client_module
from miles.engines.client import SGLangClient
from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate import Sampling
from miles.rollout.metrics import rollout_metrics
from miles.rollout.teacher import Teacher
from miles.utils.types import Sample


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture
def config_of(engine_config):
    """A configuration of on-policy distillation without a reward, with the teacher at these addresses."""

    def config(*urls, **changes):
        changes = {"use_opd": True, "opd_type": "sglang", "opd_teacher_urls": list(urls), "rm_type": None} | changes
        return engine_config.model_copy(update=changes)

    return config


def groups_of(num_groups, size, tokens=(97, 98, 99)):
    return [
        [Sample(group_index=g, index=g * size + i, tokens=[*tokens, g]) for i in range(size)] for g in range(num_groups)
    ]


async def sampled(config, url, tokenizer, groups):
    """All samples, completed by the engine at `url`, each group looked at by the teacher once it is complete."""
    teacher, sampling = Teacher(config, tokenizer), Sampling.for_rollout(config)

    async def all_live():
        return {}

    async with SGLangClient(url) as client:
        pool = EnginePool(config, [client], 512, tokenizer, all_live)

        async def finish(group):
            await pool.complete(group, [sampling.parameters(sample) for sample in group])
            await teacher.score(group)

        await asyncio.gather(*map(finish, groups))
    await teacher.close()
    return [sample for group in groups for sample in group]


# On a real server


async def test_the_model_as_its_own_teacher(config_of, engine_server, tokenizer):
    config = config_of(engine_server + "/", rollout_max_response_len=40)
    samples = await sampled(config, engine_server, tokenizer, groups_of(6, 8))
    for sample in samples:
        sample.validate()
        difference = torch.tensor(sample.teacher_log_probs) - torch.tensor(sample.rollout_log_probs)
        assert len(sample.teacher_log_probs) == sample.response_length and difference.abs().max() < 1e-4
        sample.reward = 0.0
    assert len({sample.response_length for sample in samples}) > 1
    metrics = rollout_metrics(samples, None)
    assert metrics["rollout/teacher_log_probs"] == pytest.approx(metrics["rollout/rollout_log_probs"], abs=1e-4)


async def test_the_teachers_temperature_is_1(config_of, engine_server, tokenizer, tiny_checkpoint):
    config = config_of(engine_server, rollout_temperature=0.6, rollout_max_response_len=20)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    for sample in await sampled(config, engine_server, tokenizer, groups_of(2, 2)):
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, 3:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[4:])[:, None])[:, 0]
        assert (torch.tensor(sample.teacher_log_probs) - expected).abs().max() < 1e-4


async def test_every_id_of_the_tokenizer_and_a_prompt_of_one_token(config_of, engine_server, tokenizer):
    ids = list(range(len(tokenizer)))
    samples = [Sample(index=0, tokens=[5, *ids], response_length=len(ids))]
    teacher = Teacher(config_of(engine_server), tokenizer)
    await teacher.score(samples)
    assert len(samples[0].teacher_log_probs) == len(ids)
    await teacher.close()


async def test_a_teacher_is_checked(config_of, engine_server, tokenizer, tiny_checkpoint, unused_tcp_port):
    async def check(*urls, longest=100, tokenizer=tokenizer):
        teacher = Teacher(config_of(*urls), tokenizer)
        try:
            await teacher.check(longest)
        finally:
            await teacher.close()

    await check(engine_server, engine_server)
    with pytest.raises(ValueError, match=r"takes sequences of at most (\d+) tokens.*--rollout-max-context-len \1") as e:
        await check(engine_server, longest=10_000)
    most = int(str(e.value).rsplit(" ", 1)[1])
    await check(engine_server, longest=most)
    with pytest.raises(ValueError, match=f"longer|exceed|maximum allowed length.*{most + 1}"):
        await _score_length(config_of(engine_server), tokenizer, most + 1)
    await _score_length(config_of(engine_server), tokenizer, most)
    with pytest.raises(ValueError, match=f"{unused_tcp_port} .--opd-teacher-urls. can't be asked: .*no answer"):
        await check(engine_server, f"http://127.0.0.1:{unused_tcp_port}")
    other = AutoTokenizer.from_pretrained(tiny_checkpoint)
    other.add_tokens(["<|more|>"])
    with pytest.raises(ValueError, match=r"another vocabulary: id 261 is '' to it and '<\|more\|>' to --hf-checkpoint"):
        await check(engine_server, tokenizer=other)


async def _score_length(config, tokenizer, length):
    teacher = Teacher(config, tokenizer)
    try:
        await teacher.score([Sample(index=0, tokens=[65] * length, response_length=8)])
    except RuntimeError as error:
        raise ValueError(error) from error
    finally:
        await teacher.close()


# On a stand-in


@pytest.fixture
async def stand_in(monkeypatch, tokenizer):
    """`stand_in(spoil)` starts a teacher to whom a token has the log-probability -id; `spoil` changes its answers."""
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", 0.01)
    running = []

    async def start(spoil=lambda entries: entries, delay=0.0, failures=0, **info):
        async def generate(request):
            body = await request.json()
            server.seen.append(body)
            server.in_flight += len(body["input_ids"])
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            await asyncio.sleep(delay)
            server.in_flight -= len(body["input_ids"])
            if len(server.seen) <= failures:
                return web.json_response({"error": "busy"}, status=503)
            replies = []
            for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True):
                entries = [[-float(number), number, None] for number in ids[start:]]
                entries[0][0] = None
                replies.append({"meta_info": {"input_token_logprobs": spoil(entries)}})
            return web.json_response(replies)

        async def server_info(request):
            known = {"skip_tokenizer_init": False, "max_req_input_len": 600} | info
            return web.json_response({name: value for name, value in known.items() if value is not None})

        async def detokenize(request):
            return web.json_response({"text": [tokenizer.decode(ids) for ids in (await request.json())["tokens"]]})

        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.get("/server_info", server_info)])
        app.router.add_post("/detokenize", detokenize)
        server = TestServer(app)
        server.seen, server.in_flight, server.most_in_flight = [], 0, 0
        await server.start_server()
        running.append(server)
        server.url = str(server.make_url("")).rstrip("/")
        return server

    yield start
    for server in running:
        await server.close()


def finished(index=0, prompt=(1, 2, 3), response=(7, 8)):
    return Sample(index=index, group_index=0, tokens=[*prompt, *response], response_length=len(response))


async def score(config, tokenizer, *groups):
    teacher = Teacher(config, tokenizer)
    try:
        await asyncio.gather(*map(teacher.score, groups))
    finally:
        await teacher.close()


async def test_exactly_the_response_tokens(stand_in, config_of, tokenizer):
    server = await stand_in(failures=2)
    group = [finished(), finished(1, prompt=(4,), response=(5, 6, 9))]
    await score(config_of(server.url), tokenizer, group)
    assert [sample.teacher_log_probs for sample in group] == [[-7.0, -8.0], [-5.0, -6.0, -9.0]]
    assert server.seen[-1] == {
        "input_ids": [[1, 2, 3, 7, 8], [4, 5, 6, 9]],
        "logprob_start_len": [2, 0],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
    }
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda entries: entries[:-1], "asked about 2 tokens and returned 1"),
        (lambda entries: [*entries, entries[-1]], "asked about 2 tokens and returned 3"),
        (lambda entries: [*entries[:-1], [None, 8, None]], "returned None as the log-probability of token 8"),
        (lambda entries: [entries[0], entries[2], entries[1]], "asked for token 7 at place 0 and returned 8"),
    ],
)
async def test_wrong_answers_are_refused(stand_in, config_of, tokenizer, spoil, message):
    server = await stand_in(spoil)
    with pytest.raises(RuntimeError, match=message):
        await score(config_of(server.url), tokenizer, [finished()])


async def test_endless_failures_end_in_an_error(stand_in, config_of, tokenizer):
    server = await stand_in(failures=99)
    with pytest.raises(RuntimeError, match=r"the teacher .* failed: .*HTTP 503 after 3 attempts"):
        await score(config_of(server.url, rollout_request_retries=2), tokenizer, [finished()])


async def test_groups_are_spread_and_bounded(stand_in, config_of, tokenizer):
    servers = [await stand_in(delay=0.02) for _ in range(2)]
    config = config_of(*(server.url for server in servers), sglang_server_concurrency=4)
    await score(config, tokenizer, *([finished(), finished(1)] for _ in range(20)))
    assert [len(server.seen) for server in servers] == [10, 10]
    assert [server.most_in_flight for server in servers] == [4, 4]


async def test_teachers_of_different_models(stand_in, config_of, tokenizer):
    def other(entries):
        return [[value and value - 1, number, None] for value, number, _ in entries]

    one, two = await stand_in(), await stand_in(other)
    same = Teacher(config_of(one.url, one.url), tokenizer)
    await same.check(599)
    await same.close()
    mixed = Teacher(config_of(one.url, two.url), tokenizer)
    with pytest.raises(ValueError, match="serve different models: .* differ by 1 on average"):
        await mixed.check(599)
    await mixed.close()


async def test_a_server_that_cannot_tell_or_compare(stand_in, config_of, tokenizer, caplog):
    server = await stand_in(skip_tokenizer_init=True)
    teacher = Teacher(config_of(server.url), tokenizer)
    await teacher.check(599)
    await teacher.close()
    assert "has no tokenizer that could be compared" in caplog.text
    other = await stand_in(max_req_input_len=None)
    teacher = Teacher(config_of(other.url), tokenizer)
    with pytest.raises(ValueError, match="an SGLang server is needed, here is 0"):
        await teacher.check(599)
    await teacher.close()
