"""The tools of a row (`--tool-key`), and chats in which tools were called."""

import json

import pytest

from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.tools.make_tiny_checkpoint import byte_tokenizer

# After Qwen's: tools first, calls in the assistant's turn, answers of tools in a row share one turn of the user.
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}[{{ message.content }}]
{%- else %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = TEMPLATE
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"a": {"type": "integer", "maximum": 2**70}, "b": {"type": "integer"}}},
}


def call(*arguments):
    function = {"name": "add", "arguments": dict(zip("ab", arguments, strict=True))}
    return {"type": "function", "function": function}


CHAT = [
    {"role": "user", "content": "1+2 and 3+4?"},
    {"role": "assistant", "content": None, "tool_calls": [call(1, 2), call(3, 4)]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "7"},
]


@pytest.fixture
def read(tmp_path):
    def read_row(row, tokenizer=TOKENIZER, **form):
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps(row) + "\n")
        form = PromptFormat(**({"apply_chat_template": True} | form))
        return PromptDataset(str(path), tokenizer, form, None)[0]

    return read_row


def test_tool_answers_in_a_row_are_rendered_as_the_tokenizer_does(read):
    sample = read({"input": CHAT, "tools": [ADD]})
    rendered = TOKENIZER.apply_chat_template(CHAT, tools=[ADD], add_generation_prompt=True)["input_ids"]
    assert sample.tokens == rendered
    assert sample.prompt.endswith("</call><|user|>[3][7]<|assistant|>")
    assert sample.loss_mask is None and sample.response_length == 0  # all of it is prompt, none is trained on


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_reach_the_template_and_the_metadata(read, as_text):
    row = {"input": "1+2?", "functions": json.dumps([ADD]) if as_text else [ADD], "metadata": {"x": 1}}
    sample = read(row, tool_key="functions")
    assert sample.prompt.startswith("<tools>{") and json.dumps(2**70) in sample.prompt
    assert sample.metadata == {"x": 1, "tools": [ADD]}


@pytest.mark.parametrize("tools", [None, [], "[]"])
def test_no_tools(read, tools):
    sample = read({"input": "1+2?", "tools": tools})
    assert sample.prompt == "<|user|>1+2?<|assistant|>" and sample.metadata == {}


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        ({"tools": 3}, {}, r"'tools' \(--tool-key\) is 3 \(int\); a list of objects, or one as JSON, is allowed"),
        ({"tools": ["add"]}, {}, "a list of objects"),
        ({"tools": {"name": "add"}}, {}, "a list of objects"),
        ({"tools": "add"}, {}, "not valid JSON"),
        ({"tools": '[{"a": 1, "a": 2}]'}, {}, "given twice: 'a'"),
        ({"tools": [ADD]}, {"apply_chat_template": False}, "which need --apply-chat-template"),
        ({"tools": [ADD]}, {"chat_template": "{{ messages }}"}, "which the chat template does not show to the model"),
        ({"tools": [ADD], "metadata": {"tools": []}}, {}, "'tools' stands in 'metadata' and in 'tools'"),
    ],
)
def test_tools_that_cannot_be_used(read, row, form, message):
    with pytest.raises(ValueError, match=f"jsonl:1: .*{message}"):
        read({"input": "a"} | row, **form)
