import pytest

from miles.rollout.sessions.chat_format import ChatFormat, NotAnExtension
from tests.fast.rollout.scripted import CHAT_TEMPLATE, TOOLS

PAD, EOT, USER, END, ASSISTANT = range(256, 261)
RESULTS = [{"role": "tool", "tool_call_id": f"c{i}", "name": "add", "content": str(i)} for i in range(2)]
ASKED = [{"role": "user", "content": "on"}]

# As Qwen3: an empty reasoning stands in the last message only; reasoning goes once a user follows.
THINKS = """\
{%- set ns = namespace(last_user=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set think = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' -%}
<|assistant|>
{%- if loop.index0 > ns.last_user and (loop.last or think) -%}<think>{{ think }}</think>{%- endif -%}
{{ m.content.split('</think>')[-1] }}<|end|>{{ '\n' }}
{%- else -%}<|user|>{{ m.content }}<|end|>{{ '\n' }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
# As GLM: nothing ends a turn but the opening of the next.
OPEN_ENDED = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|assistant|>{{ m.content }}{%- elif m.role == 'tool' -%}"
    "{%- if messages[loop.index0 - 1].role != 'tool' -%}<|endoftext|>{%- endif -%}({{ m.content }})"
    "{%- else -%}<|user|>{{ m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
# As DeepSeek-V3: arguments are joined to the text.
JOINS = (
    "{%- for m in messages -%}<|user|>{{ m.content }}{%- for c in m.tool_calls or [] -%}"
    "{{ ' ' + c.function.arguments }}{%- endfor -%}<|end|>{%- endfor -%}"
)
# As Mistral's: results without the calls that they answer are refused.
COUNTS = (
    "{%- for m in messages -%}{%- if m.role == 'tool' and m.tool_call_id not in messages[1].tool_calls | map(attribute="
    "'id') -%}{{ raise_exception('not called') }}{%- endif -%}<|user|>{{ m.content }}<|end|>{%- endfor -%}"
)


@pytest.fixture
def follow(tokenizer):
    """The text that follows a turn which ended in this id."""

    def follow(template, last_id, new, end_ids=(END,), tools=None):
        chat = ChatFormat(tokenizer, frozenset(end_ids), chat_template=template, name="t.jinja")
        return tokenizer.decode(chat.follow(last_id, new, tools))

    return follow


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_behind_the_end_token(follow, tools):
    results = "\n<|user|><tool_response>0</tool_response><tool_response>1</tool_response><|end|>\n<|assistant|>"
    assert follow(CHAT_TEMPLATE, END, RESULTS, tools=tools) == results
    assert follow(CHAT_TEMPLATE, 65, RESULTS, tools=tools) == "<|end|>" + results
    assert follow(CHAT_TEMPLATE, END, ASKED) == "\n<|user|>on<|end|>\n<|assistant|>"
    assert follow(CHAT_TEMPLATE, END, RESULTS + ASKED) == results[: -len("<|assistant|>")] + (
        "<|user|>on<|end|>\n<|assistant|>"
    )
    # The model has several end tokens, and ended with another than the template's.
    assert follow(CHAT_TEMPLATE, EOT, RESULTS, (END, EOT)) == results


def test_templates_that_leave_out_reasoning(follow):
    assert follow(THINKS, END, RESULTS) == "\n<|user|>0<|end|>\n<|user|>1<|end|>\n<|assistant|>"
    with pytest.raises(NotAnExtension, match="t.jinja does not keep .* once user messages follow it"):
        follow(THINKS, END, ASKED)


def test_templates_without_an_end(follow):
    ends = (EOT, USER)
    assert follow(OPEN_ENDED, EOT, RESULTS, ends) == "(0)(1)<|assistant|>"
    assert follow(OPEN_ENDED, USER, ASKED, ends) == "on<|assistant|>"
    # The model opened another turn than follows.
    assert follow(OPEN_ENDED, USER, RESULTS, ends) == "<|endoftext|>(0)(1)<|assistant|>"
    assert follow(OPEN_ENDED, 65, ASKED, ends) == "<|user|>on<|assistant|>"


def test_templates_that_join_arguments(follow, tokenizer):
    assert follow(JOINS, END, RESULTS) == "<|user|>0<|end|><|user|>1<|end|>"
    chat = ChatFormat(tokenizer, frozenset([END]), chat_template=JOINS)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ids = chat.start([{"role": "assistant", "content": None, "tool_calls": [call]}], None)
    assert tokenizer.decode(ids) == '<|user|> {"a": 1}<|end|>'


def test_templates_that_look_for_the_calls(follow):
    assert follow(COUNTS, END, RESULTS) == "<|user|>0<|end|><|user|>1<|end|>"


def test_templates_that_cannot(follow, tokenizer):
    with pytest.raises(NotAnExtension, match="t.jinja does not keep an assistant's message as it was once tool "):
        follow("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", END, RESULTS)
    with pytest.raises(NotAnExtension):
        follow("<|user|>always the same", END, RESULTS)
    # The tiny checkpoint's own template.
    chat = ChatFormat(tokenizer, frozenset([END]))
    with pytest.raises(ValueError, match="the tokenizer's chat template refuses the messages: .*not tool"):
        chat.follow(END, RESULTS, None)


def test_text_of_a_turn(tokenizer):
    chat = ChatFormat(tokenizer, frozenset([END]))
    assert chat.text([65, 66, END]) == "AB"
    assert chat.text([65, 66]) == "AB"
    assert chat.text([65, USER], [USER]) == "A"
    assert chat.text([65, USER, 66], [66]) == "A<|user|>B"
    assert chat.text([]) == ""


def test_no_template(tokenizer):
    import copy

    without = copy.copy(tokenizer)
    without.chat_template = None
    with pytest.raises(ValueError, match="no chat template; give --chat-template-path"):
        ChatFormat(without, frozenset([END]))
