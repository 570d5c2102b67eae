"""What is learned of a conversation, under templates as published models have them."""

import json

import pytest

from miles.rollout.chat_template import ChatTemplate
from miles.rollout.prompts.conversation import Conversations
from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_format import PromptFormat
from miles.rollout.sft_rollout import sft_samples
from miles.tools.make_tiny_checkpoint import byte_tokenizer
from miles.utils.errors import UserError

# As Qwen2.5: every message in tags, calls behind the text.
TAGS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ '\\n<tool_call>' + (c.function | tojson) + '</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# As Qwen3: reasoning only behind the last question, where an empty thought stands for none.
THINKING = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' -%}"
    "{%- set parts = m.content.split('</think>') -%}"
    "{%- if loop.index0 > ns.last -%}{{ '<think>\\n' }}"
    "{%- if parts | length > 1 -%}{{ parts[0].split('<think>')[-1].strip('\\n') }}{%- endif -%}"
    "{{ '\\n</think>\\n\\n' }}"
    "{%- endif -%}{{ parts[-1].lstrip('\\n') }}{%- else -%}{{ m.content }}{%- endif -%}{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}{%- endif -%}"
)
# As Llama 3: a token that ends a turn, and no line end behind it.
HEADERS = (
    "{{ '<|im_start|>' }}{%- for m in messages -%}{{ '[' + m.role + ']\\n\\n' + m.content + '<|im_end|>' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '[assistant]\\n\\n' }}{%- endif -%}"
)


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def tokenizer(template):
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def parts(template, messages, **kwargs):
    made = tokenizer(template)
    return Conversations(ChatTemplate(made, kwargs=kwargs), made).parts(messages, None)


CHAT = [say("user", "1+1?"), say("assistant", "2"), say("user", "2+2?"), say("assistant", "4")]
THOUGHTS = [say("user", "a"), say("assistant", "<think>\nx\n</think>\n\nb"), say("user", "c"), say("assistant", "d")]
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOLS = [say("user", "a"), say("assistant", "", tool_calls=[CALL]), say("tool", "3"), say("assistant", "b")]


@pytest.mark.parametrize(
    "template, kwargs, messages, learned",
    [
        (TAGS, {}, CHAT, ["2<|im_end|>", "4<|im_end|>"]),
        (HEADERS, {}, CHAT, ["2<|im_end|>", "4<|im_end|>"]),
        (THINKING, {}, CHAT, ["2<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]),
        (THINKING, {"enable_thinking": False}, CHAT, ["2<|im_end|>", "4<|im_end|>"]),
        (THINKING, {}, THOUGHTS, ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]),
        (THINKING, {}, THOUGHTS[:2], ["<think>\nx\n</think>\n\nb<|im_end|>"]),
        (
            TAGS,
            {},
            TOOLS,
            ['\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>', "b<|im_end|>"],
        ),
        (TAGS, {}, [CHAT[0], {**CHAT[1], "step_loss_mask": 0}, *CHAT[2:]], ["4<|im_end|>"]),
        (TAGS, {}, [*CHAT[:3], {**CHAT[3], "step_loss_mask": 0}], ["2<|im_end|>"]),
        (TAGS, {}, [say("system", "s"), *CHAT, say("user", "bye")], ["2<|im_end|>", "4<|im_end|>"]),
        (TAGS, {}, [say("user", "a"), say("assistant", "b"), say("assistant", "c")], ["b<|im_end|>", "c<|im_end|>"]),
    ],
)
def test_what_the_assistant_says_and_the_ends_of_its_turns(template, kwargs, messages, learned):
    found = parts(template, messages, **kwargs)
    assert [text for text, mask in found if mask] == learned
    whole = tokenizer(template).apply_chat_template(
        [{k: v for k, v in m.items() if k != "step_loss_mask"} for m in json.loads(json.dumps(messages))],
        tokenize=False,
        **kwargs,
    )
    assert "tool_calls" in messages[1] or whole.startswith("".join(text for text, _ in found))
    assert [mask for _, mask in found] == [False, True] * len(learned)


@pytest.mark.parametrize(
    "template, messages, problem",
    [
        (TAGS, [say("user", "a")], "no message of the assistant is to be learned; .* --label-key"),
        (TAGS, [say("user", "a"), {**CHAT[1], "step_loss_mask": 0}], "no message of the assistant is to be learned"),
        (TAGS, [say("user", "a"), {**CHAT[1], "step_loss_mask": 2}], "step_loss_mask is 2; 0 and 1 are allowed"),
        (TAGS, [say("user", "a"), say("assistant", "b<|im_end|>")], "does not show where message 2 begins and ends"),
        # Another text at its beginning once more follows.
        (
            "{{ messages | length }}" + TAGS,
            CHAT,
            "does not show where message 2 begins and ends",
        ),
    ],
)
def test_what_can_not_be_learned(template, messages, problem):
    with pytest.raises(UserError, match=problem):
        parts(template, messages)


def test_a_template_without_ends_of_turns():
    with pytest.raises(UserError, match="puts no special token behind a turn of the assistant"):
        parts(TAGS.replace("<|im_end|>", ""), CHAT)


def test_rows_become_samples_with_a_mask_for_each_turn(tmp_path):
    file = tmp_path / "chats.jsonl"
    masked = [{**CHAT[0]}, {**CHAT[1], "step_loss_mask": 0}, *CHAT[2:]]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (CHAT, masked)))
    form = PromptFormat(input_key="messages", apply_chat_template=True, conversations=True)
    made = tokenizer(TAGS)
    samples = [
        sample for (sample,) in sft_samples([[sample] for sample in PromptDataset(str(file), made, form, None)], made)
    ]
    for sample, learned in zip(samples, (["2<|im_end|>", "4<|im_end|>"], ["4<|im_end|>"]), strict=True):
        sample.validate()
        assert "parts" not in sample.metadata and sample.status is sample.Status.COMPLETED
        response = sample.tokens[-sample.response_length :]
        trained = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
        assert made.decode(trained) == "".join(learned)
        whole = made.apply_chat_template(CHAT, tokenize=False).removesuffix("\n")
        assert made.decode(sample.tokens) == whole == sample.prompt + sample.response


def test_a_bad_conversation_is_a_bad_row(tmp_path):
    file = tmp_path / "chats.jsonl"
    rows = [{"messages": CHAT[:1]}, {"messages": CHAT, "metadata": {"parts": 1}}, {"messages": "a"}, {"messages": CHAT}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = PromptFormat(input_key="messages", apply_chat_template=True, conversations=True)
    with pytest.raises(UserError, match="3 unusable row") as refused:
        PromptDataset(str(file), tokenizer(TAGS), form, None)
    assert f"{file}:1: no message of the assistant" in str(refused.value)
    assert f"{file}:2: 'parts' stands in the metadata" in str(refused.value)
