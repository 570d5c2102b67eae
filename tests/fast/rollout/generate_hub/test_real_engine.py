"""Conversations with the real engine: what it saw and wrote, turn after turn, is what is trained on."""

import asyncio

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.engines.client import SGLangClient
from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate_hub import agentic_tool_call, multi_turn
from miles.rollout.sessions.server import close_server
from miles.rollout.sessions.tool_calls import ParsedTurn, ToolCall
from miles.utils.types import Sample
from tests.fast.rollout.scripted import parameters

Status = Sample.Status
QUESTION = "<|user|>what?<|end|>\n<|assistant|>"


async def all_live():
    return {}


@pytest.fixture(scope="module")
def tools_config(tools_config):
    """Within the 512 tokens of the tiny checkpoint."""
    return tools_config.model_copy(update={"rollout_max_context_len": 500})


@pytest.fixture
async def pool(tools_config, engine_server, tokenizer):
    async with SGLangClient(engine_server) as client:
        yield EnginePool(tools_config, [client], 512, tokenizer, all_live)


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


def make_sample(tokenizer):
    return Sample(group_index=0, index=5, prompt="what?", tokens=tokenizer.encode(QUESTION, add_special_tokens=False))


def check_log_probs(model, sample, temperature):
    """The log-probabilities of trained tokens are those of the model for the whole sample."""
    sample.validate()
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1] / temperature
    ids = torch.tensor(sample.tokens[sample.prompt_length :])
    expected = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    given = torch.tensor(sample.rollout_log_probs)
    assert (given - expected)[mask].abs().max() < 1e-4
    assert not given[~mask].any()


class AlwaysCalls:
    """A random model writes no calls: each of its turns counts as one."""

    def check(self, tools):
        pass

    def parse(self, text, tools):
        return ParsedTurn(text, [ToolCall("c", "add", '{"a": 1, "b": 2}')])


@pytest.fixture
def calls_in_every_turn(monkeypatch):
    monkeypatch.setattr(multi_turn, "CallParser", lambda name, tokenizer: AlwaysCalls())


async def test_turns_with_tools(pool, tools_config, tokenizer, model, calls_in_every_turn):
    # Turns end at a capital letter: some within a few tokens.
    stops = {"stop": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}
    samples = [make_sample(tokenizer) for _ in range(8)]
    with pool.active():
        await asyncio.gather(
            *(multi_turn.generate(tools_config, one, parameters(tools_config, one) | stops) for one in samples)
        )
    assert max(sample.metadata["miles_multi_turn"]["turns"] for sample in samples) > 3
    for sample in samples:
        assert sample.status is Status.TRUNCATED
        check_log_probs(model, sample, 0.8)
        assert sample.response.count("<tool_response>3</tool_response>") == sample.metadata["miles_multi_turn"]["calls"]


async def test_cut_off_and_continued(pool, tools_config, tokenizer, model, calls_in_every_turn):
    config = tools_config.model_copy(update={"partial_rollout": True})
    sample = make_sample(tokenizer)
    given = parameters(config, sample) | {"stop_token_ids": list(range(64, 91)), "max_new_tokens": 300}
    cuts = 0
    with pool.active():
        while sample.status in (Status.PENDING, Status.ABORTED) and cuts < 100:
            given["max_new_tokens"] = 300 - sum(sample.loss_mask or [])
            work = asyncio.create_task(multi_turn.generate(config, sample, given))
            if cuts < 5:
                await asyncio.wait({work}, timeout=0.1)
                await pool.hold()
                pool.release()
            await work
            cuts += sample.status is Status.ABORTED
    assert 0 < cuts < 100
    assert sample.status is Status.TRUNCATED
    check_log_probs(model, sample, 0.8)


async def test_an_agent(pool, tools_config, tokenizer, model, monkeypatch):
    async def agent(base_url, prompt, request_kwargs, metadata):
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            messages = [{"role": "user", "content": prompt}]
            for _ in range(4):
                answer = await client.chat.completions.create(messages=messages, max_tokens=20, **request_kwargs)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]

    monkeypatch.setattr(agentic_tool_call, "_load_agent", lambda config: agent)
    samples = [make_sample(tokenizer) for _ in range(4)]
    with pool.active():
        pieces = await asyncio.gather(
            *(agentic_tool_call.generate(tools_config, one, parameters(tools_config, one)) for one in samples)
        )
    await close_server(pool)
    for [sample] in pieces:
        assert len(sample.weight_versions) == 4
        assert sample.tokens[: sample.prompt_length] == samples[0].tokens[: sample.prompt_length]
        assert sample.response.count("\n<|user|>on<|end|>\n<|assistant|>") == 3
        check_log_probs(model, sample, 0.8)
