import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import miles.rollout.generate as generate_module
from miles.backends.sglang_utils.client import SGLangClient, SGLangError
from miles.rollout.generate import GroupGenerator, Sampling
from miles.utils.arguments import parse_args
from miles.utils.types import Sample

END = 259  # <|end|> of the byte tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def make_groups(num_groups, size, tokens=(97, 98, 99)):
    return [
        [Sample(group_index=g, index=g * size + i, tokens=[*tokens, g]) for i in range(size)] for g in range(num_groups)
    ]


def reply(ids, reason, log_probs=None, version="1"):
    log_probs = [-0.5] * len(ids) if log_probs is None else log_probs
    meta = {
        "finish_reason": reason,
        "completion_tokens": len(ids),
        "weight_version": version,
        "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs, ids, strict=False)],
    }
    return {"output_ids": list(ids), "meta_info": meta}


LENGTH = {"type": "length", "length": 2}


class FakeClient:
    """Answers each request by `answer(input_ids)`, and counts samples in flight."""

    def __init__(self, answer=None, delay=0.0):
        self.answer = answer or (lambda input_ids: [reply([65, 66], LENGTH) for _ in input_ids])
        self.delay = delay
        self.requests, self.in_flight, self.most_in_flight = [], 0, 0

    async def generate(self, input_ids, sampling_params):
        self.requests.append((input_ids, sampling_params))
        self.in_flight += len(input_ids)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay)
            return self.answer(input_ids)
        finally:
            self.in_flight -= len(input_ids)


async def nothing(*_):
    pass


async def run(config, clients, tokenizer, groups, sampling=None, finish=nothing, check=nothing):
    generator = GroupGenerator(config, clients, config.sglang_server_concurrency, tokenizer, check)
    await generator.run(groups, sampling or Sampling.for_rollout(config), finish)
    return [sample for group in groups for sample in group]


# On a real engine


async def run_real(config, url, tokenizer, groups, sampling=None):
    async with SGLangClient(url) as client:
        return await run(config, [client], tokenizer, groups, sampling)


async def test_ids_in_ids_out_and_log_probs_of_transformers(engine_config, engine_server, tokenizer, tiny_checkpoint):
    config = engine_config.model_copy(update={"rollout_temperature": 0.7, "rollout_max_response_len": 20})
    samples = await run_real(config, engine_server, tokenizer, make_groups(3, 4))
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    for sample in samples:
        sample.validate()
        assert sample.tokens[:4] == [97, 98, 99, sample.group_index]
        assert sample.loss_mask == [1] * sample.response_length
        assert len(sample.weight_versions) == 1
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, 3:-1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[4:])[:, None])[:, 0]
        assert (torch.tensor(sample.rollout_log_probs) - expected).abs().max() < 1e-4
    responses = [tuple(sample.tokens[4:]) for sample in samples]
    assert len(set(responses)) == len(responses), "members of a group must differ"


async def test_finish_reasons(engine_config, engine_server, tokenizer):
    config = engine_config.model_copy(update={"rollout_max_response_len": 60, "rollout_max_context_len": None})
    samples = await run_real(config, engine_server, tokenizer, make_groups(16, 8))
    statuses = {sample.status for sample in samples}
    assert statuses == {Sample.Status.COMPLETED, Sample.Status.TRUNCATED}
    for sample in samples:
        response = sample.tokens[4:]
        completed = sample.status is Sample.Status.COMPLETED
        assert (response[-1] == END) == completed
        assert END not in response[:-1]
        assert sample.response_length == 60 or completed
        assert sample.response == tokenizer.decode(response[:-1] if completed else response)


async def test_end_token_at_the_limit_is_an_end(engine_config, engine_server, tokenizer):
    config = engine_config.model_copy(update={"rollout_max_response_len": 60, "rollout_max_context_len": None})
    samples = await run_real(config, engine_server, tokenizer, make_groups(16, 8))
    ended = [sample for sample in samples if sample.status is Sample.Status.COMPLETED]
    likeliest = max(ended, key=lambda sample: sample.rollout_log_probs[-1])

    one_token = config.model_copy(update={"rollout_max_response_len": 1})
    group = [Sample(group_index=0, index=i, tokens=likeliest.tokens[:-1]) for i in range(1000)]
    for sample in await run_real(one_token, engine_server, tokenizer, [group]):
        if sample.tokens[-1] == END:
            assert sample.status is Sample.Status.COMPLETED and sample.response == ""
        else:
            assert sample.status is Sample.Status.TRUNCATED
    assert any(sample.tokens[-1] == END for sample in group)


async def test_stop_texts_and_ids(engine_config, engine_server, tokenizer):
    config = engine_config.model_copy(update={"rollout_max_response_len": 100, "rollout_max_context_len": None})
    by_id = config.model_copy(update={"rollout_stop_token_ids": list(range(100, 130))})
    for sample in await run_real(by_id, engine_server, tokenizer, make_groups(2, 4)):
        assert sample.tokens[-1] in (*range(100, 130), END)
        assert sample.response == tokenizer.decode(sample.tokens[4:-1])
    by_text = config.model_copy(update={"rollout_stop": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")})
    stopped = [s for s in await run_real(by_text, engine_server, tokenizer, make_groups(2, 4)) if s.tokens[-1] != END]
    assert stopped
    for sample in stopped:
        assert chr(sample.tokens[-1]) in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        assert sample.response == tokenizer.decode(sample.tokens[4:-1])


async def test_greedy_evaluation(engine_config, engine_server, tokenizer):
    config = engine_config.model_copy(update={"eval_temperature": 0.0})
    sampling = Sampling.for_eval(config, "set")
    a, b = await run_real(config, engine_server, tokenizer, make_groups(1, 2), sampling)
    assert a.tokens == b.tokens


async def test_prompt_that_the_engine_refuses(engine_config, engine_server, tokenizer):
    config = engine_config.model_copy(update={"rollout_max_context_len": None})
    with pytest.raises(SGLangError, match="HTTP 400.*longer than the model's context length"):
        await run_real(config, engine_server, tokenizer, make_groups(1, 2, tokens=[97] * 1000))


# On a stand-in


async def test_one_request_a_group_with_seeds_of_its_own(engine_config, tokenizer):
    client = FakeClient()
    samples = await run(engine_config, [client], tokenizer, make_groups(3, 4))
    assert [len(ids) for ids, _ in client.requests] == [4, 4, 4]
    parameters = [p for _, params in client.requests for p in params]
    assert len({p["sampling_seed"] for p in parameters}) == 12
    assert all(0 <= p["sampling_seed"] < 2**63 for p in parameters)
    assert parameters[0]["max_new_tokens"] == 8
    assert [sample.response for sample in samples] == ["AB"] * 12
    again = FakeClient()
    await run(engine_config, [again], tokenizer, make_groups(3, 4))
    assert again.requests == client.requests


async def test_response_room(engine_config):
    sampling = Sampling.for_rollout(engine_config)
    assert sampling.parameters(Sample(index=0, tokens=[1] * 60))["max_new_tokens"] == 4
    with pytest.raises(ValueError, match="sample 7: its prompt of 64 tokens leaves no room.*64"):
        sampling.parameters(Sample(index=7, tokens=[1] * 64))


async def test_concurrency_limit_and_balance(engine_flags, tokenizer):
    config = parse_args([*engine_flags, "--sglang-server-concurrency", "8"])
    clients = [FakeClient(delay=0.01), FakeClient(delay=0.01)]
    await run(config, clients, tokenizer, make_groups(20, 4))
    assert [client.most_in_flight for client in clients] == [8, 8]
    assert [len(client.requests) for client in clients] == [10, 10]
    big = FakeClient(delay=0.01)
    await run(config, [big], tokenizer, make_groups(3, 10))
    assert big.most_in_flight == 10


async def test_only_the_aborted_member_is_asked_for_again(engine_config, tokenizer):
    def answer(input_ids):
        if len(client.requests) == 1:
            return [reply([65], {"type": "abort", "message": "x"}) if i == 2 else reply([66], LENGTH) for i in range(4)]
        return [reply([67], LENGTH)]

    client = FakeClient(answer)
    samples = await run(engine_config, [client], tokenizer, make_groups(1, 4))
    assert [len(ids) for ids, _ in client.requests] == [4, 1]
    assert [sample.response for sample in samples] == ["B", "B", "C", "B"]
    assert [len(sample.weight_versions) for sample in samples] == [1, 1, 1, 1]


async def test_endless_aborts_end_in_an_error(engine_config, tokenizer):
    client = FakeClient(lambda input_ids: [reply([], {"type": "abort"})] * len(input_ids))
    with pytest.raises(RuntimeError, match=r"aborted sample\(s\) \[0, 1\] of group 0 in each of 4 attempts"):
        await run(engine_config, [client], tokenizer, make_groups(1, 2))
    assert len(client.requests) == 4


async def test_counts_must_agree(engine_config, tokenizer):
    client = FakeClient(lambda input_ids: [reply([65, 66], LENGTH, log_probs=[-0.1])] * len(input_ids))
    with pytest.raises(RuntimeError, match="2 ids, 1 log-probabilities"):
        await run(engine_config, [client], tokenizer, make_groups(1, 1))


async def test_groups_finish_one_by_one(engine_config, tokenizer):
    finished = []

    async def finish(group):
        assert all(sample.status is Sample.Status.TRUNCATED for sample in group)
        finished.append(group[0].group_index)

    await run(engine_config, [FakeClient()], tokenizer, make_groups(5, 2), finish=finish)
    assert sorted(finished) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("where", ["request", "finish", "engine"])
async def test_an_error_ends_everything(engine_config, tokenizer, monkeypatch, where):
    monkeypatch.setattr(generate_module, "WATCH_SECONDS", 0.05)

    async def finish(group):
        if where == "finish":
            raise ValueError("finish")

    async def check():
        if where == "engine":
            raise ValueError("engine")

    client = FakeClient(delay=0.0 if where == "finish" else 0.2)
    if where == "request":
        client.generate = _fails_first(client.generate)
    with pytest.raises(ValueError, match=where):
        await run(engine_config, [client], tokenizer, make_groups(6, 2), finish=finish, check=check)
    assert client.in_flight == 0
    assert len(asyncio.all_tasks()) == 1


def _fails_first(generate):
    calls = []

    async def call(input_ids, sampling_params):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("request")
        return await generate(input_ids, sampling_params)

    return call


async def test_a_dead_engine_explains_a_lost_connection(engine_config, tokenizer):
    def answer(input_ids):
        raise SGLangError("http://e/generate", None, "connection reset", 4)

    async def dead():
        raise RuntimeError("log tail")

    with pytest.raises(RuntimeError, match="log tail"):
        await run(engine_config, [FakeClient(answer)], tokenizer, make_groups(1, 1), check=dead)
    with pytest.raises(SGLangError, match="connection reset"):
        await run(engine_config, [FakeClient(answer)], tokenizer, make_groups(1, 1))
