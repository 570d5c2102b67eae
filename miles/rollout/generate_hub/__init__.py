"""Ready-made generate functions, by dotted path."""

import importlib
from collections.abc import Callable
from typing import Any

from miles.config import RunConfig


def _check_of(path: str) -> Callable[[RunConfig, Any], None]:
    """`check` of the module of a generate function, which is imported when it is called."""

    def check(config: RunConfig, tokenizer: Any) -> None:
        importlib.import_module(path.rpartition(".")[0]).check(config, tokenizer)

    return check


# For each generate function here what raises ValueError, before anything is generated, where it can't be used.
CHECKS = {
    path: _check_of(path)
    for path in (
        "miles.rollout.generate_hub.multi_turn.generate",
        "miles.rollout.generate_hub.agentic_tool_call.generate",
    )
}
