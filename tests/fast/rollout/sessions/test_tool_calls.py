import asyncio
import json

import pytest

from miles.rollout.chat_template import _arguments
from miles.rollout.sessions import tool_calls
from miles.rollout.sessions.tool_calls import CallParser, ToolCall, checked_tools, execute
from miles.utils.types import Sample
from tests.fast.rollout.scripted import TOOLS, call


@pytest.fixture(scope="module")
def qwen(tokenizer):
    return CallParser("qwen25", tokenizer)


def calls_in(parsed):
    return [(found.name, json.loads(found.arguments)) for found in parsed.calls]


def test_several_calls(qwen):
    turn = qwen.parse("now " + call("add", '{"a": 1}') + "\n" + call("divide", '{"a": "Zoë", "b": 2}'), TOOLS)
    assert turn.text == "now"
    assert calls_in(turn) == [("add", {"a": 1}), ("divide", {"a": "Zoë", "b": 2})]
    assert len({found.id for found in turn.calls}) == 2
    assert turn.calls[0].as_message_part() == {
        "id": turn.calls[0].id,
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }


def test_no_call(qwen):
    for text in ("", "  plain ", "a < b", "<tool_call"):
        turn = qwen.parse(text, TOOLS)
        assert (turn.text, turn.calls, turn.unreadable) == (text, [], False)


@pytest.mark.parametrize("arguments", ["{", '{"a": __import__("os")}', "1}, {"])
def test_a_call_that_cannot_be_read(qwen, arguments, caplog):
    text = "so: " + call("add", arguments)
    turn = qwen.parse(text, TOOLS)
    assert (turn.text, turn.calls, turn.unreadable) == (text, [], True)
    assert caplog.records == [], "it is counted"


def test_json_that_is_no_call(qwen):
    turn = qwen.parse("<tool_call>\n[1, 2]\n</tool_call>", TOOLS)
    assert turn.calls == [] and turn.unreadable


def test_calls_of_unknown_tools_are_calls(qwen):
    assert calls_in(qwen.parse(call("remove", "{}"), TOOLS)) == [("remove", {})]


def test_reasoning_holds_no_calls(qwen):
    thought = "<think>maybe " + call("add", "{}") + "</think>"
    assert qwen.parse(thought + "no", TOOLS).calls == []
    turn = qwen.parse(thought + "yes" + call("divide", "{}"), TOOLS)
    assert calls_in(turn) == [("divide", {})] and turn.text == thought + "yes"


@pytest.mark.parametrize(
    "name, text",
    [
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
        ("pythonic", "[add(a=1)]"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
         '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'),
    ],
)  # fmt: skip
def test_other_families(tokenizer, name, text):
    assert calls_in(CallParser(name, tokenizer).parse(text, TOOLS)) == [("add", {"a": 1})]


@pytest.mark.parametrize("tools", [None, [], {}, ["add"], [{"name": "add"}], [{"function": {"name": 3}}]])
def test_tools_must_be_schemas(tools):
    with pytest.raises(ValueError, match="these must "):
        checked_tools("these", tools)
    assert checked_tools("these", tuple(TOOLS)) == TOOLS


def test_schemas_that_sglang_cannot_take(qwen):
    qwen.check(TOOLS)
    with pytest.raises(ValueError, match="description"):
        qwen.check([{"type": "function", "function": {"name": "f", "description": 5}}])


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "", "3", "NaN"])
async def test_arguments_that_are_no_object(arguments):
    [message], failed = await execute(None, [ToolCall("c", "add", arguments)], TOOLS, Sample())
    assert failed == 1 and "failed: the arguments are no JSON object: " in message["content"]
    assert len(message["content"]) < 300
    _arguments(arguments)  # for the template: whatever it is


async def test_what_a_model_wrote_fakes_no_log_lines(caplog):
    with caplog.at_level("INFO", logger="miles"):
        await execute(None, [ToolCall("c", "x\n\x1b[31mERROR all is lost", "{}")], TOOLS, Sample())
    [record] = caplog.records
    assert "\n" not in record.getMessage() and "\x1b" not in record.getMessage()


async def test_all_calls_of_a_turn_share_a_time_limit(monkeypatch):
    monkeypatch.setattr(tool_calls, "TOOL_TIMEOUT_SECONDS", 0.02)

    async def hangs(name, arguments, sample):
        await asyncio.Event().wait()

    async with asyncio.timeout(1.0):
        messages, failed = await execute(hangs, [ToolCall(str(i), "add", "{}") for i in range(200)], TOOLS, Sample())
    assert failed == len(messages) == 200
    assert {message["content"] for message in messages} == {"The call of add failed: no result within 0.02 seconds"}
