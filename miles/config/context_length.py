"""How many tokens an engine takes: what SGLang makes of the model's config.json and of its own arguments."""

import json
import re
from decimal import Decimal
from typing import Any

from miles.config.values import Values
from miles.hf.shape import model_shape

# An SGLang server takes inputs of at most this many tokens less than its context.
KEPT_BY_SGLANG = 7
# Where SGLang looks for the length of a context, in its order.
KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
UNITS = {"": 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}


def model_context(v: Values) -> int | None:
    """Tokens of the model's context by SGLang's rule, None where config.json does not say.

    It is the length in config.json, times the factor of its rope scaling, unless that says from which length it scales.
    """
    shape, changes = model_shape(v.hf_checkpoint), overridden(v)
    if shape is None or changes is None:
        return None
    shape = shape | changes.get("text_config", changes)
    scaling: dict[str, Any] = shape.get("rope_scaling") or shape.get("rope_parameters") or {}
    scaled = "original_max_position_embeddings" not in scaling and scaling.get("rope_type") != "llama3"
    factor = scaling.get("factor", 1) if scaled else 1
    lengths = (shape[key] for key in KEYS if shape.get(key) is not None)
    return next((int(factor * length) for length in lengths), None)


def overridden(v: Values) -> dict[str, Any] | None:
    """What --sglang-json-model-override-args changes in config.json; None where that is no JSON object."""
    try:
        changes = json.loads(v.sglang.get("json_model_override_args", "{}"))
    except json.JSONDecodeError:
        return None
    return changes if isinstance(changes, dict) else None


def number_of_tokens(given: int | str) -> int | None:
    """A number as SGLang writes it, perhaps with a unit; None where it is none."""
    parts = re.fullmatch(r"(\d+|\d+\.\d+(?=[kM]))(k|M|Ki|Mi|)", str(given).strip())
    return None if parts is None else int(Decimal(parts[1]) * UNITS[parts[2]])


def engine_context(v: Values) -> int | None:
    """Tokens of an engine's context: --sglang-context-length, else the model's; None where that is not known."""
    given = v.sglang.get("context_length")
    return model_context(v) if given is None else number_of_tokens(given)


def longest_context(v: Values) -> int | None:
    """Most tokens of prompt and response that an engine goes on with, None where that is not known.

    A response that was cut off, or that tools have answered, is an input again, and so is one that a teacher looks at.
    """
    context = engine_context(v)
    return None if context is None else context - KEPT_BY_SGLANG
