import json

import pytest

from miles.rollout.generate_hub import CHECKS, multi_turn
from miles.rollout.sessions import tool_calls
from miles.utils.errors import UserError
from miles.utils.types import Sample
from tests.fast.rollout.scripted import PAUSE, TOOLS, call, parameters, scripted_pool

Status = Sample.Status
END = 259
QUESTION = "<|user|>what?<|end|>\n<|assistant|>"


def make_sample(tokenizer):
    return Sample(group_index=0, index=5, prompt=QUESTION, tokens=tokenizer.encode(QUESTION, add_special_tokens=False))


async def converse(config, tokenizer, write, sample=None, **changes):
    """A finished conversation with a scripted model, and the engine that wrote it."""
    sample = make_sample(tokenizer) if sample is None else sample
    pool, engine = scripted_pool(config, tokenizer, write)
    with pool.active():
        result = await multi_turn.generate(config, sample, parameters(config, sample) | changes)
    assert result is sample
    sample.validate()
    return sample, engine


def shown(sample, tokenizer):
    """The response with what is trained on in brackets."""
    parts, trained = "", 0
    for token, mask in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True):
        parts += "" if mask == trained else "[" if mask else "]"
        parts += tokenizer.decode([token])
        trained = mask
    return parts + "]" * trained


async def test_two_calls_and_their_results_as_the_template_writes_them(tools_config, tokenizer):
    first = "let me see" + call("add", '{"a": 1, "b": 2}') + call("divide", '{"a": 8, "b": 2}')
    sample, engine = await converse(tools_config, tokenizer, [first + "<|end|>", "both<|end|>"])
    assert sample.status is Status.COMPLETED
    assert shown(sample, tokenizer) == (
        f"[{first}<|end|>]\n<|user|><tool_response>3</tool_response><tool_response>4.0</tool_response><|end|>\n"
        "<|assistant|>[both<|end|>]"
    )
    calls = [("add", {"a": 1, "b": 2}, "3"), ("divide", {"a": 8, "b": 2}, "4.0")]
    message = {
        "role": "assistant",
        "content": "let me see",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments, _ in calls],
    }
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "what?"},
            message,
            *({"role": "tool", "content": result} for *_, result in calls),
            {"role": "assistant", "content": "both"},
        ],
        chat_template=open(tools_config.chat_template_path).read(),
        tokenize=False,
    )
    assert tokenizer.decode(sample.tokens) + "\n" == rendered
    assert sample.metadata["miles_multi_turn"] == {
        "turns": 2,
        "calls": 2,
        "failed_calls": 0,
        "turn_start": len(sample.tokens) - sample.prompt_length - 5,
        "answer": "both",
    }
    assert tool_calls.tool_metrics([sample, Sample()]) == {
        "rollout/turns": 2,
        "rollout/tool_calls": 2,
        "rollout/failed_tool_calls": 0,
    }


async def test_what_the_engine_sees_and_wrote_is_what_is_trained_on(tools_config, tokenizer):
    # Bytes that are no UTF-8 text: a text would not become the same ids again.
    odd = [0xC3, 0x28, 0xFF]
    first = call("add", '{"a": 1, "b": 2}') + "<|end|>"
    sample = make_sample(tokenizer)
    prompt = list(sample.tokens)
    pool, engine = scripted_pool(tools_config, tokenizer, [first, "done<|end|>"])
    encode = engine.tokenizer

    def with_odd(text, **kwargs):
        ids = encode(text, **kwargs)["input_ids"]
        return {"input_ids": odd + ids}

    engine.tokenizer = type("Odd", (), {"__call__": staticmethod(with_odd), "decode": encode.decode})()
    with pool.active():
        await multi_turn.generate(tools_config, sample, parameters(tools_config, sample))
    wrote = odd + encode(first)["input_ids"]
    assert engine.requests[0][0] == prompt
    assert engine.requests[1][0][: len(prompt) + len(wrote)] == prompt + wrote
    assert sample.tokens[: len(engine.requests[1][0])] == engine.requests[1][0]
    trained = [token for token, mask in zip(sample.tokens[len(prompt) :], sample.loss_mask, strict=True) if mask]
    assert trained == wrote + odd + encode("done<|end|>")["input_ids"]
    log_probs = dict(zip(sample.loss_mask, sample.rollout_log_probs, strict=True))
    assert log_probs == {1: -0.5, 0: 0.0}
    assert sample.weight_versions == ["1", "1"] and sum(sample.weight_version_lengths) == sample.response_length


@pytest.mark.parametrize(
    "written, result",
    [
        (call("divide", '{"a": 1, "b": 0}'), "The call of divide failed: ZeroDivisionError: division by zero"),
        (call("nope", "{}"), "The call of nope failed: there is no tool 'nope'; there are add, divide"),
        (call("add", "[1]"), "The call of add failed: the arguments are no JSON object: [1]"),
        (call("add", '{"a": null}'), "The call of add failed: no result within 0.01 seconds"),
    ],
)
async def test_a_call_that_fails_is_answered_and_counted(tools_config, tokenizer, monkeypatch, written, result):
    monkeypatch.setattr(tool_calls, "TOOL_TIMEOUT_SECONDS", 0.01)
    sample, _ = await converse(tools_config, tokenizer, [written + "<|end|>", "well<|end|>"])
    assert sample.status is Status.COMPLETED
    assert f"<tool_response>{result}</tool_response>" in sample.response
    assert sample.metadata["miles_multi_turn"]["failed_calls"] == 1


async def test_a_tool_that_returns_no_text_is_a_mistake(tools_config, tokenizer, monkeypatch):
    async def execute(name, arguments, sample):
        return 3

    monkeypatch.setattr(multi_turn, "load_execute_tool", lambda config: execute)
    with pytest.raises(ValueError, match=r"--generate-execute-tool-function-path returned 3 \(int\) for add"):
        await converse(tools_config, tokenizer, [call("add", "{}") + "<|end|>"])


ADD = call("add", '{"a": 1, "b": 2}') + "<|end|>"


async def test_the_last_turn_may_not_call(tools_config, tokenizer):
    config = tools_config.model_copy(update={"generate_max_turns": 3})
    sample, engine = await converse(config, tokenizer, lambda prompt: ADD)
    assert sample.status is Status.TRUNCATED
    assert len(engine.requests) == 3 and sample.metadata["miles_multi_turn"]["calls"] == 2
    assert shown(sample, tokenizer).endswith(f"[{ADD}]")


async def test_limits_of_trained_and_of_all_tokens(tools_config, tokenizer):
    turn = len(ADD) - len("<|end|>") + 1
    sample, engine = await converse(tools_config, tokenizer, lambda prompt: ADD, max_new_tokens=2 * turn + 3)
    assert sample.status is Status.TRUNCATED and sum(sample.loss_mask) == 2 * turn + 3
    assert [given["max_new_tokens"] for _, given in engine.requests] == [2 * turn + 3, turn + 3, 3]

    length = len(sample.tokens)
    for limit, requests in ((length, 3), (length - 3, 2)):
        config = tools_config.model_copy(update={"rollout_max_context_len": limit})
        sample, engine = await converse(config, tokenizer, lambda prompt: ADD)
        assert sample.status is Status.TRUNCATED and len(sample.tokens) <= limit
        assert len(engine.requests) == requests
        assert sample.loss_mask[-1] == 1, "results that nothing follows are left out"
    # The last turn is cut off within a call: nothing is executed.
    assert sample.metadata["miles_multi_turn"]["calls"] == 2


async def test_a_turn_that_no_end_token_ended_gets_it_from_the_template(tools_config, tokenizer):
    first = call("add", '{"a": 1, "b": 2}')
    write = [first, "done<|end|>"]
    sample, _ = await converse(tools_config, tokenizer, write, stop=["</tool_call>"])
    assert shown(sample, tokenizer).startswith(f"[{first}]<|end|>\n<|user|><tool_response>3")
    # SGLang ends at the stop text; the parser needs what the template's own format says.
    assert sample.metadata["miles_multi_turn"]["calls"] == 1


async def aborted_in(config, tokenizer, write, sample=None):
    """A conversation that `hold` cuts off at the script's PAUSE; the pool is released afterwards."""
    import asyncio

    sample = make_sample(tokenizer) if sample is None else sample
    pool, engine = scripted_pool(config, tokenizer, write)
    with pool.active():
        task = asyncio.create_task(multi_turn.generate(config, sample, parameters(config, sample)))
        await engine.writing.wait()
        await pool.hold()
        await task
        pool.release()
    sample.validate()
    assert sample.status is Status.ABORTED
    return sample, pool, engine


async def test_an_aborted_conversation_goes_on_where_it_was(tools_config, tokenizer):
    config = tools_config.model_copy(update={"partial_rollout": True})
    texts = iter([ADD, ADD, "the an" + PAUSE, "swer<|end|>"])
    sample, pool, engine = await aborted_in(config, tokenizer, lambda prompt: next(texts))
    assert sample.response.endswith("<|assistant|>the an")
    sample = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    engine.version = "2"
    with pool.active():
        await multi_turn.generate(config, sample, parameters(config, sample))
    sample.validate()
    whole, _ = await converse(config, tokenizer, [ADD, ADD, "the answer<|end|>"])
    assert sample.status is Status.COMPLETED
    assert (sample.tokens, sample.loss_mask, sample.response) == (whole.tokens, whole.loss_mask, whole.response)
    assert sample.metadata == whole.metadata
    assert sample.weight_versions == ["1", "1", "1", "2"]


async def test_a_call_cut_in_two_is_executed_once(tools_config, tokenizer):
    config = tools_config.model_copy(update={"partial_rollout": True})
    texts = iter([ADD[:20] + PAUSE, ADD[20:], "3<|end|>"])
    sample, pool, _ = await aborted_in(config, tokenizer, lambda prompt: next(texts))
    with pool.active():
        await multi_turn.generate(config, sample, parameters(config, sample))
    assert sample.status is Status.COMPLETED and sample.metadata["miles_multi_turn"]["calls"] == 1
    assert shown(sample, tokenizer).startswith(f"[{ADD}]\n<|user|><tool_response>3</tool_response>")


async def test_held_between_turns(tools_config, tokenizer, monkeypatch):
    """The pool is held while a tool runs: its result is kept, and no turn is half there."""
    config = tools_config.model_copy(update={"partial_rollout": True})
    pool, engine = scripted_pool(config, tokenizer, [ADD, "3<|end|>"])
    sample = make_sample(tokenizer)

    async def execute(name, arguments, sample):
        await pool.hold()
        return "3"

    monkeypatch.setattr(multi_turn, "load_execute_tool", lambda config: execute)
    with pool.active():
        await multi_turn.generate(config, sample, parameters(config, sample))
        assert sample.status is Status.ABORTED and len(engine.requests) == 1
        assert shown(sample, tokenizer).endswith("</tool_response><|end|>\n<|assistant|>")
        pool.release()
        await multi_turn.generate(config, sample, parameters(config, sample))
    assert sample.status is Status.COMPLETED and sample.metadata["miles_multi_turn"]["turns"] == 2


async def test_without_partial_rollout_turns_have_one_version(tools_config, tokenizer):
    def write(prompt):
        engine.version = str(len(engine.requests))
        return ADD

    pool, engine = scripted_pool(tools_config, tokenizer, write)
    sample = make_sample(tokenizer)
    with pool.active():
        await multi_turn.generate(tools_config, sample, parameters(tools_config, sample))
        assert sample.status is Status.ABORTED and len(engine.requests) == 2
        sample.reset_for_retry()
        engine.write = lambda prompt: "4<|end|>"
        await multi_turn.generate(tools_config, sample, parameters(tools_config, sample))
    assert sample.status is Status.COMPLETED
    assert sample.metadata["miles_multi_turn"]["turns"] == 1 and sample.response == "4"


async def test_tools_of_the_row(tools_config, tokenizer):
    config = tools_config.model_copy(update={"generate_tool_specs_path": None})
    for used in (config, tools_config):
        sample = make_sample(tokenizer)
        sample.metadata["tools"] = TOOLS[1:]
        sample, _ = await converse(used, tokenizer, [ADD, "no<|end|>"], sample)
        assert "there is no tool 'add'; there are divide" in sample.response
    with pytest.raises(ValueError, match="sample 5 has no tools: its row has no column 'tools'"):
        await converse(config, tokenizer, [ADD])


def test_check(tools_config, tokenizer, tmp_path):
    check = CHECKS[tools_config.custom_generate_function_path]
    check(tools_config, tokenizer)
    with pytest.raises(ValueError, match="qwen2: SGLang has no such parser; did you mean qwen"):
        check(tools_config.model_copy(update={"generate_tool_call_parser": "qwen2"}), tokenizer)
    with pytest.raises(ValueError, match="--generate-tool-call-parser is not given"):
        check(tools_config.model_copy(update={"generate_tool_call_parser": None}), tokenizer)
    with pytest.raises(UserError, match="SGLang can't take the tool {'type': 'function'}: "):
        tool_calls.CallParser("qwen25", None).check([{"type": "function"}])
    with pytest.raises(ValueError, match="--generate-tool-specs-path .*execute must be a list of at least one"):
        path = tools_config.generate_execute_tool_function_path
        check(tools_config.model_copy(update={"generate_tool_specs_path": path}), tokenizer)
    # The template of the tiny checkpoint knows no tools.
    with pytest.raises(ValueError, match="the chat template of .*tiny-qwen3 refuses the messages"):
        check(tools_config.model_copy(update={"chat_template_path": None}), tokenizer)
