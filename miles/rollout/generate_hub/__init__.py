"""Ready-made generate functions, by dotted path, and the parts that they are made of."""

from collections.abc import Callable

from miles.config import RunConfig


def _check_multi_turn(config: RunConfig) -> None:
    from miles.rollout.generate_hub import multi_turn

    multi_turn.check(config)


def _check_agentic_tool_call(config: RunConfig) -> None:
    from miles.rollout.generate_hub import agentic_tool_call

    agentic_tool_call.check(config)


# For each generate function here what raises ValueError, before anything is generated, where it can't be used.
CHECKS: dict[str, Callable[[RunConfig], None]] = {
    "miles.rollout.generate_hub.multi_turn.generate": _check_multi_turn,
    "miles.rollout.generate_hub.agentic_tool_call.generate": _check_agentic_tool_call,
}
