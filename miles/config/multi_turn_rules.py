"""What the flags of tools and agents must satisfy. What their functions are is checked where they are loaded."""

from collections.abc import Iterator

from miles.config.paths import dotted_path_problem
from miles.config.values import Values

MULTI_TURN = "miles.rollout.generate_hub.multi_turn.generate"
AGENT = "miles.rollout.generate_hub.agentic_tool_call.generate"


def _multi_turn(v: Values) -> Iterator[str]:
    if v.custom_generate_function_path != MULTI_TURN or not v.needs_engines:
        return
    why = f"--custom-generate-function-path {MULTI_TURN} needs"
    if v.generate_tool_call_parser is None:
        yield f"{why} --generate-tool-call-parser, a name that SGLang's --tool-call-parser knows, such as qwen25"
    if v.generate_execute_tool_function_path is None:
        yield f"{why} --generate-execute-tool-function-path, an async function of (name, arguments, sample)"
    if not v.apply_chat_template:
        yield f"{why} --apply-chat-template: the results of tools are messages of a chat"
    yield from _context(v, why)


def _agent(v: Values) -> Iterator[str]:
    if v.custom_generate_function_path != AGENT or not v.needs_engines:
        return
    why = f"--custom-generate-function-path {AGENT} needs"
    if v.custom_agent_function_path is None:
        yield f"{why} --custom-agent-function-path, an async function of (base_url, prompt, request_kwargs, metadata)"
    yield from _context(v, why)


def _context(v: Values, why: str) -> Iterator[str]:
    if v.rollout_max_context_len is None:
        yield f"{why} --rollout-max-context-len, the most tokens of a conversation with all that is not the model's"


def _paths(v: Values) -> Iterator[str]:
    for flag, path, example in (
        ("--generate-tool-specs-path", v.generate_tool_specs_path, "package.module.TOOLS"),
        ("--generate-execute-tool-function-path", v.generate_execute_tool_function_path, "package.module.execute"),
        ("--custom-agent-function-path", v.custom_agent_function_path, "package.module.agent"),
    ):
        problem = None if path is None else dotted_path_problem(flag, path, example)
        if problem is not None:
            yield problem


def _address(v: Values) -> Iterator[str]:
    if v.session_server_ip.strip("[]") in ("", "0.0.0.0", "::"):
        yield (
            f"--session-server-ip {v.session_server_ip!r} is every address of this machine; agents are told to ask "
            "there: give the one that they reach"
        )


def multi_turn_warnings(v: Values) -> Iterator[str]:
    """Flags of tools and agents that nothing reads: an evaluation set may have a function that does."""
    if v.custom_generate_function_path is not None or v.eval_config is not None:
        return
    for flag, value in (
        ("--custom-agent-function-path", v.custom_agent_function_path),
        ("--generate-execute-tool-function-path", v.generate_execute_tool_function_path),
        ("--generate-tool-call-parser", v.generate_tool_call_parser),
    ):
        if value is not None:
            yield f"{flag} {value} has no effect without --custom-generate-function-path, such as {MULTI_TURN}"


MULTI_TURN_RULES = [_multi_turn, _agent, _paths, _address]
