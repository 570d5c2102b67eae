"""One conversation through both doors, the rows of a file and the requests of agents, in templates of many styles."""

import json

import pytest

from miles.rollout.chat_template import normal_message
from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.rollout.sessions.chat_format import ChatFormat
from miles.rollout.sessions.chat_protocol import BadRequest, read_request
from miles.tools.make_tiny_checkpoint import byte_tokenizer

OPEN = "{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
EACH = "{%- for m in messages -%}"
# As Qwen3: calls are JSON, of texts or objects alike; the result of a tool is a user's.
CHATML = (
    EACH + "[{{ 'user' if m.role == 'tool' else m.role }}]{{ m.content }}{%- for c in m.tool_calls or [] -%}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {% if c.function.arguments is string %}'
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}}</call>"
    "{%- endfor -%}{%- endfor -%}" + OPEN
)
# As Llama-3.1: calls one by one, always written as JSON; the text beside them is left out.
LLAMA = (
    EACH + "[{{ m.role }}]{%- if 'tool_calls' in m -%}{%- if m.tool_calls | length != 1 -%}"
    "{{- raise_exception('only single calls') -}}{%- endif -%}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{%- else -%}{{ m.content | trim }}{%- endif -%}{%- endfor -%}" + OPEN
)
# As Mistral: the whole function is written as JSON, and ids have nine characters.
MISTRAL = (
    EACH + "{%- if m.tool_calls is defined -%}{%- for c in m.tool_calls -%}{%- if c.id | length != 9 -%}"
    "{{- raise_exception('ids of nine') -}}{%- endif -%}[CALLS]{{ c.function | tojson }}, {{ c.id }}{%- endfor -%}"
    "{%- elif m.role == 'tool' -%}[RESULT]{{ m.tool_call_id }} {{ m.content }}"
    "{%- else -%}[{{ m.role }}]{{ m.content }}{%- endif -%}{%- endfor -%}" + OPEN
)
# As DeepSeek-V3: calls only where the content is null, and their arguments are joined to a text.
DEEPSEEK = (
    EACH + "{%- if m.role == 'assistant' and m.content is none -%}{%- for c in m.tool_calls -%}"
    "{{ '<call>' + c.function.name + '\\n' + c.function.arguments + '</call>' }}{%- endfor -%}"
    "{%- elif m.role == 'assistant' -%}{{ '[assistant]' + m.content + '<eos>' }}"
    "{%- else -%}{{ '[' + m.role + ']' + m.content }}{%- endif -%}{%- endfor -%}" + OPEN
)
# As some of Hermes: an object would be shown as Python writes it.
HERMES = (
    EACH + "[{{ m.role }}]{{ m.content }}{%- for c in m.tool_calls or [] -%}"
    "<call>{{ c.function.name }} {{ c.function.arguments }}</call>{%- endfor -%}{%- endfor -%}" + OPEN
)
# As SmolVLM: contents in parts alone.
PARTS = (
    EACH + "[{{ m.role }}]{%- for part in m.content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- for c in m.tool_calls or [] -%}({{ c.function.arguments | tojson }}){%- endfor -%}"
    "{%- endfor -%}" + OPEN
)
SHOWN = {
    CHATML: '[user]Hi, Ünal[assistant]<call>{"name": "f", "arguments": {"city": "Bonn", "n": 1.5}}</call>[user]3'
    "[assistant]",
    LLAMA: '[user]Hi, Ünal[assistant]{"name": "f", "parameters": {"city": "Bonn", "n": 1.5}}[tool]3[assistant]',
    MISTRAL: '[user]Hi, Ünal[CALLS]{"name": "f", "arguments": {"city": "Bonn", "n": 1.5}}, call00001'
    "[RESULT]call00001 3[assistant]",
    DEEPSEEK: '[user]Hi, Ünal<call>f\n{"city": "Bonn", "n": 1.5}</call>[tool]3[assistant]',
    HERMES: '[user]Hi, Ünal[assistant]<call>f {"city": "Bonn", "n": 1.5}</call>[tool]3[assistant]',
}
ARGUMENTS = {"city": "Bonn", "n": 1.5}


def chat(*, content=None, arguments=ARGUMENTS, hello="Hi, Ünal"):
    calls = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return [
        {"role": "user", "content": hello},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call00001", "content": "3"},
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def doors(tokenizer, tmp_path):
    """The text of a row, after its tokens have been compared with those of a request."""

    def doors(template, messages):
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps({"input": messages}))
        form = PromptFormat(apply_chat_template=True, chat_template=template)
        [sample] = PromptDataset(str(path), tokenizer, form, None)
        agents = ChatFormat(tokenizer, frozenset([260]), chat_template=template)
        assert sample.tokens == agents.start(read_request({"messages": messages}).messages, None)
        return sample.prompt

    return doors


@pytest.mark.parametrize("template", SHOWN, ids=["chatml", "llama", "mistral", "deepseek", "hermes"])
@pytest.mark.parametrize(
    "messages",
    [
        chat(),
        chat(arguments=json.dumps(ARGUMENTS), content=""),
        chat(hello=[{"type": "text", "text": "Hi, "}, {"type": "text", "text": "Ünal"}], content=[]),
    ],
    ids=["objects", "json", "parts"],
)
def test_rows_and_agents_get_the_same_tokens(doors, template, messages):
    assert doors(template, messages) == SHOWN[template]


def test_contents_in_parts(doors):
    assert doors(PARTS, chat()) == '[user]Hi, Ünal[assistant]({"city": "Bonn", "n": 1.5})[tool]3[assistant]'


def test_reasoning_is_kept_for_the_templates_that_show_it(doors):
    template = EACH + "[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{%- endfor -%}"
    messages = [{"role": "assistant", "reasoning_content": "so", "content": "A"}, {"role": "user", "content": "on"}]
    assert doors(template, messages) == "[assistant]soA[user]on"


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}],
         "holds a part of type 'image_url'; only text is understood"),
        (CHATML, [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], "holds 'b'; only text"),
        (CHATML, [{"role": "user", "content": {"a": 1}}], "content must be a text or a list of text parts"),
        (CHATML, chat(arguments=3), "arguments, an object or its JSON"),
        (EACH + "{{ m.content }}{%- endfor -%}", chat(), "does not show the model all calls of tools"),
        (DEEPSEEK, chat(content="so"), "and a text, beside which it does not show them"),
    ],
)  # fmt: skip
def test_what_neither_door_lets_in(doors, tokenizer, template, messages, problem):
    with pytest.raises(ValueError, match=f"jsonl:1: .*{problem}"):
        doors(template, messages)
    agents = ChatFormat(tokenizer, frozenset([260]), chat_template=template)
    with pytest.raises((BadRequest, ValueError), match=problem):
        agents.start(read_request({"messages": messages}).messages, None)


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": NaN}'])
def test_a_row_whose_arguments_are_no_object(doors, arguments):
    with pytest.raises(ValueError, match="message 2 of 'input': the arguments of the call of f are no JSON object"):
        doors(CHATML, chat(arguments=arguments))


def test_calls_as_some_data_sets_write_them():
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "é"}}, {"function": {"name": "g"}}]}
    assert normal_message(message)["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}},
        {"type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
