"""What follows for evaluation from the flags of rollouts."""

import pytest

from miles.config.resolve import resolve


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, None, "tools")),
        ({"rollout_max_context_len": "100"}, (None, 100, "tools")),
        ({"rollout_max_context_len": "100", "rollout_max_prompt_len": "20"}, (20, 100, "tools")),
        ({"rollout_max_context_len": "100", "eval_max_context_len": "200"}, (None, 200, "tools")),
        ({"rollout_max_prompt_len": "20", "eval_max_prompt_len": "30", "tool_key": "t"}, (30, None, "t")),
        ({"tool_key": "t", "eval_tool_key": "u"}, (None, None, "u")),
    ],
)
def test_what_follows(argv, given, expected):
    config = resolve(argv(**given)).config
    assert (config.eval_max_prompt_len, config.eval_max_context_len, config.eval_tool_key) == expected
