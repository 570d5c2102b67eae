import asyncio
import socket
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest
from transformers import AutoTokenizer

from miles.rollout.sessions.server import check_address, close_server, server_of
from miles.utils.types import Sample
from tests.fast.rollout.scripted import CHAT_TEMPLATE, TOOLS, scripted_pool

MESSAGES = [{"role": "user", "content": "what?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="module")
def config(engine_config, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(CHAT_TEMPLATE)
    return engine_config.model_copy(
        update={"chat_template_path": str(template), "rollout_max_context_len": 2**21, "rollout_max_response_len": 50}
    )


@pytest.fixture
async def opened(config, tokenizer):
    """Opens a session whose model writes these texts: (HTTP client for its URL, session, engine)."""
    pools = []

    @asynccontextmanager
    async def opened(*texts, **changes):
        used = config.model_copy(update=changes)
        pool, engine = scripted_pool(used, tokenizer, texts)
        pools.append(pool)
        server = await server_of(used, pool)
        parameters = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 50, "stop": ["END"], "sampling_seed": 7}
        async with (
            server.session(used, Sample(index=1, tokens=[1]), parameters) as (session, url),
            aiohttp.ClientSession(base_url=f"{url}/") as client,
        ):
            engine.pool = pool
            yield client, session, engine

    yield opened
    for pool in pools:
        await close_server(pool)


async def post(client, path="chat/completions", **body):
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def test_an_answer(opened):
    async with opened("A<|end|>") as (client, _, engine):
        status, body = await post(client, model="any", messages=MESSAGES, temperature=0, top_p=0.1, top_k=1, seed=3)
    assert status == 200
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 2
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": "stop", "logprobs": None}
    ]
    # Sampling is the run's: the trainer takes the log-probabilities for those of the model at its temperature.
    [(_, given)] = engine.requests
    assert given == {
        "temperature": 0.8,
        "top_p": 0.9,
        "max_new_tokens": 50,
        "stop": ["END"],
        "sampling_seed": 7,
        "stop_token_ids": given["stop_token_ids"],
    }


async def test_stops_and_limits_of_a_request_are_added(opened):
    async with opened("A<|end|>", "B<|end|>") as (client, _, engine):
        await post(client, messages=MESSAGES, stop="x", max_tokens=9)
        await post(client, messages=MESSAGES, stop=["x", "y"], max_completion_tokens=1000)
    asked = [(given["stop"], given["max_new_tokens"]) for _, given in engine.requests]
    assert asked == [(["END", "x"], 9), (["END", "x", "y"], 48)]


@pytest.mark.parametrize(
    "body, says",
    [
        ({"stream": True}, "stream is True; here it may be False"),
        ({"n": 2}, "n is 2; here it may be 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias can't be asked for here"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5"),
        ({"response_format": {"type": "json_object"}}, "response_format is "),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice is 'required'; here it may be 'auto' or 'none'"),
        ({"tools": [{"name": "f"}]}, "tools must each be"),
        ({"messages": [{"role": [], "content": "x"}]}, "role of assistant"),
        ({"tools": TOOLS}, "the run has no --generate-tool-call-parser"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer"),
        ({"stop": [1]}, "stop must be a text or a list of texts"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role of assistant, developer, system, tool, user"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is understood"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "must have the tool_call_id"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 3}]}, "content must be a text"),
    ],
)
async def test_what_is_refused(opened, body, says):
    async with opened() as (client, session, engine):
        status, answer = await post(client, **({"messages": MESSAGES} | body))
    assert status == 400 and says in answer["error"]["message"]
    assert engine.requests == [] and not session.exhausted


async def test_nulls_and_the_usual_are_as_if_not_said(opened):
    usual = {"stream": False, "n": 1, "frequency_penalty": 0.0, "logprobs": False, "tools": [], "user": "me"}
    async with opened("A<|end|>") as (client, _, _):
        status, _ = await post(client, messages=MESSAGES, logit_bias=None, response_format={"type": "text"}, **usual)
    assert status == 200


async def test_messages_that_say_the_same(opened):
    """Clients write an answer down in their own way: the conversation goes on all the same."""
    async with opened("A<|end|>", "B<|end|>") as (client, session, _):
        await post(client, messages=MESSAGES)
        answer = {"role": "assistant", "content": [{"type": "text", "text": "A"}], "refusal": None, "tool_calls": None}
        await post(client, messages=[*MESSAGES, answer, {"role": "user", "content": "on", "name": None}])
        [piece] = session.pieces
        assert piece.turns == 2


async def test_an_answer_that_nobody_got_is_not_trained_on(opened):
    async with opened("A\0", "B<|end|>") as (client, session, engine):
        with pytest.raises(TimeoutError):
            await client.post("chat/completions", json={"messages": MESSAGES}, timeout=aiohttp.ClientTimeout(0.2))
        await post(client, messages=MESSAGES)
        [piece] = session.pieces
        assert piece.sample.response == "B"
        assert engine.pool.in_flight == 0, "nobody waits for the first one"


async def test_a_session_that_ends_ends_its_requests(opened):
    async with opened("A\0") as (client, session, engine):
        asking = asyncio.create_task(post(client, messages=MESSAGES))
        await engine.writing.wait()
        await session.close()
        assert engine.pool.in_flight == 0
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await asking
        async with client.post("chat/completions", json={"messages": MESSAGES}) as response:
            assert response.status == 503 and (await response.json())["error"]["code"] == "session_stopped"
            # OpenAI's client repeats a 503 otherwise, which helps nobody here.
            assert response.headers["x-should-retry"] == "false"


async def test_schemas_that_sglang_cannot_take(opened):
    tools = [{"type": "function", "function": {"name": "f", "description": 5}}]
    async with opened(generate_tool_call_parser="qwen25") as (client, _, engine):
        status, body = await post(client, messages=MESSAGES, tools=tools)
    assert status == 400 and "tools: " in body["error"]["message"] and engine.requests == []


async def test_each_conversation_has_a_seed_of_its_own(opened):
    async with opened("A<|end|>", "A<|end|>", "B<|end|>") as (client, _, engine):
        await post(client, messages=MESSAGES)
        await post(client, messages=MESSAGES)
        await post(client, messages=[*MESSAGES, {"role": "assistant", "content": "A"}, *MESSAGES])
    assert [given["sampling_seed"] for _, given in engine.requests] == [7, 8, 7]


async def test_a_refused_conversation_changes_no_other(opened):
    async with opened("A<|end|>", rollout_max_context_len=100) as (client, session, _):
        await post(client, messages=MESSAGES)
        status, body = await post(client, messages=[{"role": "user", "content": "x" * 100}])
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert session.pieces[0].sample.status is Sample.Status.COMPLETED


async def test_what_is_another_conversation(opened):
    answer = {"role": "assistant", "content": "A"}
    tail = {"role": "user", "content": "on"}
    for other in (
        {"messages": [*MESSAGES, answer, tail], "tools": TOOLS},
        {"messages": [*MESSAGES, answer, {"role": "assistant", "content": "mine"}, tail]},
        {"messages": [*MESSAGES, {**answer, "content": "A "}, tail]},
        {"messages": MESSAGES},
    ):
        async with opened("A<|end|>", "B<|end|>", generate_tool_call_parser="qwen25") as (client, session, _):
            await post(client, messages=MESSAGES)
            status, _ = await post(client, **other)
            assert status == 200 and [piece.turns for piece in session.pieces] == [1, 1]


async def test_the_longest_conversation_goes_on(opened):
    async with opened("A<|end|>", "A<|end|>", "B<|end|>", "C<|end|>") as (client, session, _):
        messages = list(MESSAGES)
        await post(client, messages=messages)
        await post(client, messages=messages)
        for content in "BC":
            messages += [{"role": "assistant", "content": "A" if content == "B" else "B"}, *MESSAGES]
            await post(client, messages=messages)
        assert sorted(piece.turns for piece in session.pieces) == [1, 3]


async def test_a_conversation_that_is_being_answered_is_not_gone_on_with(opened):
    async with opened("A<|end|>", "B\0", "C<|end|>") as (client, session, engine):
        await post(client, messages=MESSAGES)
        messages = [*MESSAGES, {"role": "assistant", "content": "A"}, *MESSAGES]
        asking = asyncio.create_task(post(client, messages=messages))
        await engine.writing.wait()
        await post(client, messages=messages)
        asking.cancel()
        assert [piece.sample.response for piece in session.pieces] == ["A", "C"]


async def test_bodies(opened):
    async with opened("A<|end|>") as (client, _, _):
        async with client.post("chat/completions", data=b"{") as response:
            assert response.status == 400 and "the body is no JSON" in await response.text()
        async with client.post("chat/completions", json=[1]) as response:
            assert response.status == 400 and "must be a JSON object" in await response.text()
        status, _ = await post(client, messages=[{"role": "user", "content": "x" * 2**20}])
        assert status == 200


async def test_names_of_sessions(opened, config):
    async with opened() as (client, _, _), opened() as (other, _, _):
        names = [str(each._base_url).split("/")[-3] for each in (client, other)]
        assert len(set(names)) == 2 and min(map(len, names)) >= 43, "256 bits each"
        assert client._base_url.host == config.session_server_ip == "127.0.0.1"
        for name in ("", names[0][:-1], "x" * 43):
            url = str(client._base_url).replace(names[0], name)
            for path in ("chat/completions", "models"):
                method = client.post if path == "chat/completions" else client.get
                async with method(url + path, json={}) as response:
                    assert response.status == 404
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=9) as openais:
        with pytest.raises(openai.NotFoundError):
            await openais.chat.completions.create(model="m", messages=MESSAGES)


async def test_listens_on_one_address_only(opened):
    async with opened() as (client, _, _):
        port = client._base_url.port
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", port)) == 0
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.2", port)) != 0


async def test_a_port_that_is_taken(config, tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pool, _ = scripted_pool(config, tokenizer, [])
        used = config.model_copy(update={"session_server_port": port})
        says = f"--session-server-ip 127.0.0.1, --session-server-port {port}: .*in use"
        with pytest.raises(ValueError, match=says):
            check_address(used)
        with pytest.raises(ValueError, match=says):
            await server_of(used, pool)
        await close_server(pool)
