"""The rules of tools' and agents' flags, broken once each, and what they allow."""

import pytest

from miles.config.multi_turn_rules import AGENT, MULTI_TURN, MULTI_TURN_RULES, multi_turn_warnings
from miles.config.resolve import ConfigError, resolve
from miles.rollout.generate_hub import CHECKS

TOOLS = {
    "custom_generate_function_path": MULTI_TURN,
    "generate_tool_call_parser": "qwen25",
    "generate_execute_tool_function_path": "my_tools.execute",
    "apply_chat_template": "",
    "rollout_max_context_len": "4096",
}
AGENTS = {
    "custom_generate_function_path": AGENT,
    "custom_agent_function_path": "my_agent.run",
    "rollout_max_context_len": "4096",
}
CASES = {
    "_multi_turn": [
        (TOOLS | {"generate_tool_call_parser": None}, "needs --generate-tool-call-parser, a name that SGLang's"),
        (
            TOOLS | {"generate_execute_tool_function_path": None},
            "needs --generate-execute-tool-function-path, an",
        ),
        (TOOLS | {"apply_chat_template": None}, "needs --apply-chat-template: the results of tools are messages"),
        (TOOLS | {"rollout_max_context_len": None}, f"path {MULTI_TURN} needs --rollout-max-context-len, the most"),
    ],
    "_agent": [
        (AGENTS | {"custom_agent_function_path": None}, "needs --custom-agent-function-path, an async function"),
        (AGENTS | {"rollout_max_context_len": None}, f"path {AGENT} needs --rollout-max-context-len, the most"),
    ],
    "_paths": [
        (TOOLS | {"generate_execute_tool_function_path": "execute"}, "must be the dotted path of a function"),
        (TOOLS | {"generate_tool_specs_path": "a.b-c"}, "--generate-tool-specs-path a.b-c must be the dotted path"),
        (
            AGENTS | {"custom_agent_function_path": "agent"},
            "--custom-agent-function-path agent must be the",
        ),
    ],
    "_address": [
        ({"session_server_ip": "0.0.0.0"}, "--session-server-ip '0.0.0.0' is every address of this machine"),
        ({"session_server_ip": "[::]"}, "--session-server-ip '[::]' is every address of this machine"),
    ],
}


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in MULTI_TURN_RULES]


@pytest.mark.parametrize(("changes", "message"), [case for cases in CASES.values() for case in cases])
def test_broken_rule(argv, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize("changes", [TOOLS, AGENTS, {"generate_max_turns": "3"}, {"session_server_ip": "10.0.0.1"}])
def test_allowed(argv, changes):
    resolve(argv(**changes))


def test_the_functions_are_checked_where_they_are_loaded():
    assert list(CHECKS) == [MULTI_TURN, AGENT]


@pytest.mark.parametrize("kept", [True, False])
def test_flags_that_nothing_reads(argv, kept):
    changes = TOOLS | AGENTS | {"custom_generate_function_path": AGENT if kept else None}
    warnings = list(multi_turn_warnings(resolve(argv(**changes)).config))
    flags = ["--custom-agent-function-path", "--generate-execute-tool-function-path", "--generate-tool-call-parser"]
    assert [warning.split()[0] for warning in warnings] == ([] if kept else flags)
