"""Conversations: tools that are called between turns, and agents that ask an endpoint."""

from typing import ClassVar

from pydantic import Field

from miles.config.section import Section


class MultiTurnConfig(Section):
    title: ClassVar[str] = "Tools and agents"

    generate_max_turns: int = Field(16, gt=0, description="Most responses of the model in one conversation.")
    generate_tool_specs_path: str | None = Field(
        None, description="List of the tools' JSON schemas, by dotted path, for rows that have no tools of their own."
    )
    generate_tool_call_parser: str | None = Field(
        None, description="How calls stand in the text: a name that SGLang's --tool-call-parser knows, such as qwen25."
    )
    generate_execute_tool_function_path: str | None = Field(
        None,
        description="Executes a call: (name, arguments, sample) by dotted path, async or not, for the text of its "
        "result.",
    )
    custom_agent_function_path: str | None = Field(
        None,
        description="An agent: (base_url, prompt, request_kwargs, metadata) by dotted path, async or not. It talks to "
        "the model at base_url, an OpenAI-compatible endpoint; a dict that it returns goes into the samples' metadata.",
    )
    session_server_ip: str = Field("127.0.0.1", description="Address that the endpoint for agents listens on.")
    session_server_port: int | None = Field(
        None, gt=0, lt=65536, description="Port of the endpoint for agents. Unset: a free one."
    )
