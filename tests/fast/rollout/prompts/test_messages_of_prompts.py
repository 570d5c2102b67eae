"""An agent sends messages itself: those of a rendered prompt are kept for it."""

import json

import pytest

from miles.rollout.prompts.data_source import PromptDataset
from miles.rollout.prompts.prompt_format import PromptFormat
from tests.fast.rollout.scripted import TOOLS

MESSAGES = [{"role": "user", "content": "what?"}]


@pytest.fixture
def read(tokenizer, tmp_path):
    def read(row, **form):
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps(row))
        [sample] = PromptDataset(str(path), tokenizer, PromptFormat(apply_chat_template=True, **form), None)
        return sample

    return read


@pytest.mark.parametrize("prompt", ["what?", MESSAGES])
def test_kept_beside_the_rendered_text(read, prompt):
    sample = read({"input": prompt, "metadata": {"a": 1}}, keep_messages=True)
    assert sample.prompt == "<|user|>what?<|assistant|>"
    assert sample.metadata == {"a": 1, "messages": MESSAGES}
    assert read({"input": prompt}).metadata == {}


def test_refused_where_the_row_has_others(read):
    with pytest.raises(ValueError, match="'messages' stands in 'metadata', where an agent's prompt is kept"):
        read({"input": "what?", "metadata": {"messages": []}}, keep_messages=True)


def test_kept_where_there_is_an_agent(tools_config):
    for path, kept in ((None, False), ("a.b", True)):
        config = tools_config.model_copy(update={"custom_agent_function_path": path})
        assert PromptFormat.from_config(config, input_key="input", label_key=None).keep_messages is kept


def test_tools_by_path_are_in_the_prompt(tools_config, tokenizer, read):
    form = PromptFormat.from_config(tools_config, input_key="input", label_key=None)
    assert form.tools == TOOLS
    form.template_of(tokenizer)
    given = {"tools": form.tools, "chat_template": form.chat_template}
    sample = read({"input": "what?"}, **given)
    assert sample.prompt.startswith("tools: add divide\n<|user|>what?") and sample.metadata == {}
    sample = read({"input": "what?", "tools": TOOLS[:1]}, **given)
    assert sample.prompt.startswith("tools: add\n") and sample.metadata == {"tools": TOOLS[:1]}
    with pytest.raises(ValueError, match="--generate-tool-specs-path: the chat template does not show tools"):
        PromptFormat(apply_chat_template=True, tools=TOOLS).template_of(tokenizer)
