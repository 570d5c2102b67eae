import asyncio
import json

import openai
import pytest

from miles.rollout.engine_pool import EnginesLost
from miles.rollout.generate_hub import CHECKS, agentic_tool_call
from miles.rollout.sessions.server import close_server
from miles.utils.arguments import parse_args
from miles.utils.types import Sample
from tests.fast.rollout.scripted import PAUSE, TOOLS, call, parameters, scripted_pool

Status = Sample.Status
QUESTION = [{"role": "user", "content": "what?"}]


async def no_agent(base_url, prompt, request_kwargs, metadata):
    """For the flag; tests replace it."""


@pytest.fixture(scope="module")
def config(chat_flags):
    generate = ("--custom-generate-function-path", "miles.rollout.generate_hub.agentic_tool_call.generate")
    return parse_args([*chat_flags, *generate, "--custom-agent-function-path", f"{__name__}.no_agent"])


@pytest.fixture(autouse=True)
async def nothing_runs_on():
    yield
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def make_sample(**metadata):
    return Sample(group_index=3, index=7, prompt="what?", label="3", tokens=[1, 2], metadata=metadata)


@pytest.fixture
async def run(config, tokenizer, monkeypatch, nothing_runs_on):
    """Runs an agent (client, prompt, kwargs, metadata) with a scripted model; returns the samples."""
    pools = []

    async def run(agent, write, sample=None, should_stop=None, pool=None, **changes):
        async def with_client(base_url, prompt, kwargs, metadata):
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
                return await agent(client, prompt, kwargs, metadata)

        monkeypatch.setattr(agentic_tool_call, "_load_agent", lambda config: with_client)
        used = config.model_copy(update=changes)
        if pool is None:
            pool, _ = scripted_pool(used, tokenizer, write)
        sample = make_sample() if sample is None else sample
        pools.append(pool)
        with pool.active(should_stop):
            samples = await agentic_tool_call.generate(used, sample, parameters(used, sample))
        for piece in samples:
            piece.validate()
            assert (piece.group_index, piece.prompt, piece.label) == (3, "what?", "3")
        return samples

    yield run
    for pool in pools:
        await close_server(pool)


async def ask(client, kwargs, messages, **more):
    """The model's answer, which is added to `messages`."""
    completion = await client.chat.completions.create(messages=messages, **kwargs, **more)
    messages.append(completion.choices[0].message.model_dump(exclude_none=True))
    return completion


def texts(samples, tokenizer):
    """Each sample as its prompt, and its response with what is trained on in brackets."""
    shown = []
    for sample in samples:
        start, text = sample.prompt_length, tokenizer.decode(sample.tokens[: sample.prompt_length]) + "#"
        for place in range(start, len(sample.tokens)):
            token = tokenizer.decode([sample.tokens[place]])
            text += f"[{token}]" if sample.loss_mask[place - start] else token
        shown.append(text.replace("][", ""))
    return shown


ADD = call("add", '{"a": 1, "b": 2}')


async def test_tools_through_openais_client(run, tokenizer):
    seen = {}

    async def agent(client, prompt, kwargs, metadata):
        seen.update(prompt=prompt, kwargs=kwargs, metadata=metadata)
        messages = [{"role": "user", "content": prompt}]
        first = await ask(client, kwargs, messages, tools=TOOLS)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        [tool_call] = choice.message.tool_calls
        assert tool_call.function.name == "add" and json.loads(tool_call.function.arguments) == {"a": 1, "b": 2}
        messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": "3"})
        second = await ask(client, kwargs, messages, tools=TOOLS)
        assert second.choices[0].finish_reason == "stop" and second.choices[0].message.content == "it is 3"
        assert second.usage.completion_tokens == len("it is 3") + 1
        assert second.usage.prompt_tokens == len(
            tokenizer.encode(
                f"tools: add divide\n<|user|>what?<|end|>\n<|assistant|>hm{ADD}<|end|>\n"
                "<|user|><tool_response>3</tool_response><|end|>\n<|assistant|>"
            )
        )
        assert [model.id async for model in client.models.list()] == [kwargs["model"]]
        return {"steps": 2}

    [sample] = await run(agent, [f"hm{ADD}<|end|>", "it is 3<|end|>"], make_sample(task="sum"))
    assert seen == {"prompt": "what?", "kwargs": {"model": "miles", "temperature": 0.8}, "metadata": {"task": "sum"}}
    assert texts([sample], tokenizer) == [
        f"tools: add divide\n<|user|>what?<|end|>\n<|assistant|>#[hm{ADD}<|end|>]\n"
        "<|user|><tool_response>3</tool_response><|end|>\n<|assistant|>[it is 3<|end|>]"
    ]
    assert sample.status is Status.COMPLETED and sample.index == 7
    assert sample.metadata == {"task": "sum", "steps": 2}


async def test_a_sample_with_a_response_begins_anew(run, tokenizer):
    async def agent(client, prompt, kwargs, metadata):
        await ask(client, kwargs, list(QUESTION))

    sample = make_sample()
    sample.append_context([3, 4])
    [sample] = await run(agent, ["A<|end|>"], sample)
    assert texts([sample], tokenizer) == ["<|user|>what?<|end|>\n<|assistant|>#[A<|end|>]"]


async def test_a_call_that_the_limit_cuts_off_is_none(run):
    async def agent(client, prompt, kwargs, metadata):
        answer = await ask(client, kwargs, list(QUESTION), tools=TOOLS, max_tokens=len(ADD) + 1)
        assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.tool_calls is None

    [sample] = await run(agent, [ADD + "more<|end|>"])
    assert sample.status is Status.TRUNCATED


async def test_other_conversations_are_other_samples(run, tokenizer):
    async def agent(client, prompt, kwargs, metadata):
        main = [{"role": "user", "content": prompt}]
        await ask(client, kwargs, main)
        helper = [{"role": "system", "content": "help"}, {"role": "user", "content": "sub"}]
        await ask(client, kwargs, helper)
        main.append({"role": "user", "content": "and?"})
        await ask(client, kwargs, main)
        # The context is made shorter: what the model wrote is a prompt now.
        main[:] = [main[0], {"role": "assistant", "content": "in short"}, {"role": "user", "content": "so?"}]
        await ask(client, kwargs, main)

    samples = await run(agent, ["A<|end|>", "B<|end|>", "C<|end|>", "D<|end|>"])
    assert texts(samples, tokenizer) == [
        "<|user|>what?<|end|>\n<|assistant|>#[A<|end|>]\n<|user|>and?<|end|>\n<|assistant|>[C<|end|>]",
        "<|user|>help<|end|>\n<|user|>sub<|end|>\n<|assistant|>#[B<|end|>]",
        "<|user|>what?<|end|>\n<|assistant|>in short<|end|>\n<|user|>so?<|end|>\n<|assistant|>#[D<|end|>]",
    ]


async def test_requests_at_the_same_time(run, tokenizer):
    async def agent(client, prompt, kwargs, metadata):
        main = [{"role": "user", "content": prompt}]
        await ask(client, kwargs, main)
        branches = [[*main, {"role": "user", "content": f"branch {i}"}] for i in range(2)]
        await asyncio.gather(*(ask(client, kwargs, branch) for branch in branches))

    samples = await run(agent, lambda prompt: f"{len(prompt)}<|end|>")
    shown = sorted(texts(samples, tokenizer), key=len)
    assert len(shown) == 2, "one goes on with the conversation, the other begins one of its own"
    assert [text.count("[34<|end|>]") for text in shown] == [0, 1], shown
    assert {text for text in "01" for line in shown if f"branch {text}" in line} == {"0", "1"}


async def test_what_the_template_writes_anew_is_another_sample(run, config, tokenizer, tmp_path):
    from tests.fast.rollout.scripted import CHAT_TEMPLATE

    template = tmp_path / "forgets.jinja"
    template.write_text(
        CHAT_TEMPLATE.replace(
            "{{ message.content }}",
            "{{ message.content.split('</think>')[-1] "
            "if message.role == 'assistant' and not loop.last else message.content }}",
            1,
        )
    )

    async def agent(client, prompt, kwargs, metadata):
        main = [{"role": "user", "content": prompt}]
        await ask(client, kwargs, main)
        main.append({"role": "user", "content": "and?"})
        await ask(client, kwargs, main)

    samples = await run(agent, ["<think>x</think>A<|end|>", "B<|end|>"], chat_template_path=str(template))
    assert texts(samples, tokenizer) == [
        "<|user|>what?<|end|>\n<|assistant|>#[<think>x</think>A<|end|>]",
        "<|user|>what?<|end|>\n<|assistant|>A<|end|>\n<|user|>and?<|end|>\n<|assistant|>#[B<|end|>]",
    ]


async def test_an_agents_own_limit_and_stop(run, tokenizer):
    async def agent(client, prompt, kwargs, metadata):
        main = [{"role": "user", "content": prompt}]
        first = await ask(client, kwargs, main, max_tokens=4)
        assert first.choices[0].finish_reason == "length"
        main.append({"role": "user", "content": "on"})
        second = await ask(client, kwargs, main, stop="!")
        assert second.choices[0].finish_reason == "stop" and second.choices[0].message.content == "well"

    [sample] = await run(agent, ["abcdefgh<|end|>", "well!"])
    assert texts([sample], tokenizer) == [
        "<|user|>what?<|end|>\n<|assistant|>#[abcd]<|end|>\n<|user|>on<|end|>\n<|assistant|>[well!]"
    ]
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(
    "limits, says",
    [
        ({"generate_max_turns": 2}, "answered 2 times in this conversation"),
        ({"rollout_max_response_len": 12}, "written 12 tokens, all that it may"),
        ({"rollout_max_context_len": 60}, "leaves no room for an answer"),
    ],
)
async def test_limits_of_the_run(run, limits, says):
    async def agent(client, prompt, kwargs, metadata):
        main = [{"role": "user", "content": prompt}]
        for _ in range(9):
            await ask(client, kwargs, main)
            main.append({"role": "user", "content": "on"})

    async def careful(client, prompt, kwargs, metadata):
        with pytest.raises(openai.BadRequestError, match=says) as refused:
            await agent(client, prompt, kwargs, metadata)
        assert refused.value.code == "context_length_exceeded"
        return {"careful": True}

    [sample] = await run(careful, lambda prompt: "A<|end|>", **limits)
    assert sample.status is Status.TRUNCATED and sample.metadata == {"careful": True}
    [sample] = await run(agent, lambda prompt: "A<|end|>", **limits)
    assert sample.status is Status.TRUNCATED and sample.metadata == {}
    assert sum(sample.loss_mask) <= 12 and len(sample.tokens) <= 60


@pytest.mark.parametrize(
    "returned, problem", [(3, "3 .int.; it must return a dict"), ({"a": {1}}, "..a.. is .1. .set., which JSON")]
)
async def test_what_goes_into_no_metadata(run, returned, problem):
    async def agent(client, prompt, kwargs, metadata):
        await ask(client, kwargs, list(QUESTION))
        return returned

    with pytest.raises(ValueError, match=f"--custom-agent-function-path returned.*{problem}"):
        await run(agent, ["A<|end|>"])


async def test_errors_of_the_agent(run):
    async def silent(client, prompt, kwargs, metadata):
        pass

    with pytest.raises(RuntimeError, match="sample 7: its agent got no answer of the model"):
        await run(silent, [])

    async def broken(client, prompt, kwargs, metadata):
        await ask(client, kwargs, list(QUESTION))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await run(broken, ["A<|end|>"])


async def test_errors_of_the_engines(run, config, tokenizer):
    pool, engine = scripted_pool(config, tokenizer, [])

    async def fails(samples, parameters):
        raise EnginesLost("all dead")

    pool.complete = fails

    async def agent(client, prompt, kwargs, metadata):
        with pytest.raises(openai.InternalServerError, match="all dead"):
            await ask(client, kwargs, list(QUESTION))

    with pytest.raises(EnginesLost, match="all dead"):
        await run(agent, None, pool=pool)


async def cut_off(run, config, tokenizer, write, agent, *, ends, **changes):
    """Holds the pool while the model is at its PAUSE, and releases it; `ends`: the rollout ends."""
    pool, engine = scripted_pool(config, tokenizer, write)
    task = asyncio.create_task(run(agent, None, should_stop=lambda: ends, pool=pool, **changes))
    await engine.writing.wait()
    await pool.hold()
    if ends:
        await asyncio.wait_for(asyncio.shield(task), 5)
    engine.version = "2"
    pool.release()
    samples = await task
    limits = [given["max_new_tokens"] for _, given in engine.requests]
    assert limits == [400, 398, 396][: len(limits)], "what is left, turn after turn and within one"
    return samples


async def two_turns(client, prompt, kwargs, metadata):
    main = [{"role": "user", "content": prompt}]
    await ask(client, kwargs, main)
    main.append({"role": "user", "content": "on"})
    await ask(client, kwargs, main)


async def test_new_weights_during_an_answer(run, config, tokenizer):
    write = ["A<|end|>", "he" + PAUSE, "re<|end|>"]
    [sample] = await cut_off(run, config, tokenizer, write, two_turns, ends=False, partial_rollout=True)
    assert texts([sample], tokenizer)[0].endswith("[A<|end|>]\n<|user|>on<|end|>\n<|assistant|>[here<|end|>]")
    assert sample.status is Status.COMPLETED and sample.weight_versions == ["1", "1", "2"]
    assert sum(sample.loss_mask) == 7


@pytest.mark.parametrize("ends, partial", [(True, True), (True, False), (False, False)])
async def test_an_agent_that_is_cut_off_starts_anew(run, config, tokenizer, ends, partial):
    write = ["A<|end|>", "he" + PAUSE]
    [sample] = await cut_off(run, config, tokenizer, write, two_turns, ends=ends, partial_rollout=partial)
    assert sample.status is Status.ABORTED
    assert sample.tokens == [1, 2] and sample.response_length == 0
    [sample] = await run(two_turns, ["A<|end|>", "B<|end|>"], sample)
    assert sample.status is Status.COMPLETED and sample.weight_versions == ["1", "1"]


async def test_an_agent_at_work_elsewhere_is_not_waited_for(run, config, tokenizer):
    pool, engine = scripted_pool(config, tokenizer, ["A<|end|>"])
    working, cleaned = asyncio.Event(), []

    async def agent(client, prompt, kwargs, metadata):
        await ask(client, kwargs, list(QUESTION))
        working.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    stopping = []
    task = asyncio.create_task(run(agent, None, should_stop=lambda: bool(stopping), pool=pool, partial_rollout=True))
    await working.wait()
    await pool.hold()  # new weights
    pool.release()
    await asyncio.sleep(0)
    assert not task.done()
    stopping.append(True)
    await pool.hold()
    [sample] = await asyncio.wait_for(task, 5)
    assert sample.status is Status.ABORTED and cleaned == [True]


async def test_versions_of_turns_without_partial_rollout(run, config, tokenizer):
    def write(prompt):
        engine.version = str(len(engine.requests))
        return "A<|end|>"

    pool, engine = scripted_pool(config, tokenizer, write)
    [sample] = await run(two_turns, None, pool=pool)
    assert sample.status is Status.ABORTED and sample.response_length == 0


async def test_cancelling_ends_agent_and_session(run, config, tokenizer):
    pool, engine = scripted_pool(config, tokenizer, ["A" + PAUSE])
    urls = []

    async def agent(client, prompt, kwargs, metadata):
        urls.append(str(client.base_url))
        await ask(client, kwargs, list(QUESTION))

    task = asyncio.create_task(run(agent, None, pool=pool))
    await engine.writing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.in_flight == 0
    async with openai.AsyncOpenAI(base_url=urls[0], api_key="none") as client:
        with pytest.raises(openai.NotFoundError, match="its agent has ended"):
            await client.models.list()


async def test_messages_of_the_row(run):
    async def agent(client, prompt, kwargs, metadata):
        assert prompt == [{"role": "system", "content": "s"}, *QUESTION] and metadata == {"a": 1}
        await ask(client, kwargs, prompt)

    rows = make_sample(messages=[{"role": "system", "content": "s"}, *QUESTION], a=1)
    [sample] = await run(agent, ["A<|end|>"], rows)
    assert len(sample.metadata["messages"]) == 2


def test_check(config, tokenizer):
    check = CHECKS[config.custom_generate_function_path]
    check(config, tokenizer)
    with pytest.raises(ValueError, match="--custom-agent-function-path is not given"):
        check(config.model_copy(update={"custom_agent_function_path": None}), tokenizer)
    with pytest.raises(ValueError, match="no_such: can't be imported"):
        check(config.model_copy(update={"custom_agent_function_path": f"{__name__}.no_such"}), tokenizer)
