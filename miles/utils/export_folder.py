"""Which folders an export may replace."""

import json
import os
from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
WRITER = "miles"


def export_problem(folder: str | Path) -> str | None:
    """Why no export is written to `folder`, in one sentence: only an older one of ours is replaced. None if one may."""
    if not os.path.exists(folder):
        return None
    index = Path(folder) / INDEX_FILE
    if index.is_file() and json.loads(index.read_text()).get("metadata", {}).get("writer") == WRITER:
        return None
    return f"{folder} exists and was not written by this program: name another folder"
