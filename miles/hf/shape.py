"""What config.json says of a model, as it is written, read without torch."""

import json
from pathlib import Path
from typing import Any


def read_config_json(folder: str | Path) -> Any:
    """What config.json of a Hugging Face checkpoint holds.

    Raises:
        OSError, ValueError: there is none that can be read, or it is not JSON.
    """
    return json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))


def end_ids_said(folder: str | Path) -> set[int]:
    """The ids that end a response by config.json and generation_config.json."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(folder, name)
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return ids


def model_shape(folder: str | Path) -> dict[str, Any] | None:
    """What config.json says of the language model, for `families.shape_of` for example.

    None where it cannot be read, which a rule of the flag says.
    """
    try:
        shape = read_config_json(folder)
    except (OSError, ValueError):
        return None
    return shape.get("text_config", shape) if isinstance(shape, dict) else None
