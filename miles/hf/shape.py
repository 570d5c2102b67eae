"""What config.json says of a model, as it is written, read without torch."""

import json
from pathlib import Path
from typing import Any

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_config_json(folder: str | Path) -> Any:
    """What config.json of a Hugging Face checkpoint holds.

    Raises:
        OSError, ValueError: there is none that can be read, or it is not JSON.
    """
    return json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))


def model_shape(folder: str | Path) -> dict[str, Any] | None:
    """What config.json says of the language model; None where it cannot be read, which a rule of the flag says."""
    try:
        shape = read_config_json(folder)
    except (OSError, ValueError):
        return None
    return shape.get("text_config", shape) if isinstance(shape, dict) else None


def experts_of(shape: dict[str, Any]) -> int:
    """Experts of one layer of a model; 0 for a dense one."""
    return next((shape[key] for key in EXPERT_COUNTS if shape.get(key)), 0)
