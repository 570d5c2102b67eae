"""The examples of docs/user-guide/agents.md, with a scripted model."""

import pytest
from openai import AsyncOpenAI  # noqa: F401  imported here, outside of the time that a test takes

from examples.agents import reward, tools
from miles.config.multi_turn import AGENT
from miles.rollout.generate_hub import CHECKS, agentic_tool_call, multi_turn
from miles.rollout.sessions.server import close_server
from miles.utils.arguments import parse_args
from miles.utils.types import Sample
from tests.fast.rollout.scripted import call, parameters, scripted_pool

TURNS = [
    call("calculate", '{"a": 2, "operation": "/", "b": 0}') + "<|end|>",
    call("calculate", '{"a": 2, "operation": "*", "b": 21}') + "<|end|>",
    "42<|end|>",
]


@pytest.fixture(scope="module")
def config(chat_flags):
    return parse_args(
        [
            *chat_flags,
            *("--custom-generate-function-path", AGENT),
            *("--custom-agent-function-path", "examples.agents.calculator.agent"),
            *("--generate-tool-specs-path", "examples.agents.tools.TOOLS"),
            *("--generate-execute-tool-function-path", "examples.agents.tools.execute"),
        ]
    )


@pytest.mark.parametrize("hub", [agentic_tool_call, multi_turn])
async def test_calculator(config, tokenizer, hub):
    for check in CHECKS.values():
        check(config, tokenizer)
    question = "tools: calculate\n<|user|>2 * 21?<|end|>\n<|assistant|>"
    sample = Sample(index=0, prompt="2 * 21?", label="42", tokens=tokenizer.encode(question, add_special_tokens=False))
    pool, _ = scripted_pool(config, tokenizer, TURNS)
    with pool.active():
        result = await hub.generate(config, sample, parameters(config, sample))
    await close_server(pool)
    [sample] = result if isinstance(result, list) else [result]
    assert sample.status is Sample.Status.COMPLETED and sample.metadata["calculations"] == 2
    assert tokenizer.decode(sample.tokens).startswith(question + TURNS[0] + "\n<|user|><tool_response>")
    assert "division by zero</tool_response>" in sample.response
    assert await reward.reward(config, sample) == 1.0
    assert sample.response.endswith("<|user|><tool_response>42</tool_response><|end|>\n<|assistant|>42")


@pytest.mark.parametrize("arguments", [("1", "+", 2), (1, "**", 2), (True, "+", 2)])
def test_calculations_that_are_none(arguments):
    with pytest.raises(ValueError, match="two numbers and one of"):
        tools.calculate(*arguments)
