"""What config.json says of quantised weights, and which of it is read; nothing here needs torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELOPT_FILE = "hf_quant_config.json"
E4M3 = ("e4m3", "float8_e4m3fn")
# What published checkpoints call formats whose weights are not read, by quant_method.
OTHER_METHODS = {
    "awq": "AWQ, 4 bits",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors, among them INT4",
    "fbgemm_fp8": "FP8 with a scale for each row",
    "gptq": "GPTQ, 4 bits",
    "modelopt": "ModelOpt, among them NVFP4",
    "quark": "Quark",
}


def quantization_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a config.json, whole or the language model's; None where weights are as they are."""
    language_model = fields.get("text_config") or {}
    for part in (fields, language_model):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                return part[key]
    return None


def quantization_in(folder: str | Path) -> dict[str, Any] | None:
    """As `quantization_of`, of a checkpoint's folder; None too where its config.json can't be read."""
    try:
        fields = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    quantization = quantization_of(fields) if isinstance(fields, dict) else None
    if quantization is None and Path(folder, MODELOPT_FILE).is_file():
        return {"quant_method": "modelopt"}
    return quantization


def quantization_problem(quantization: Mapping[str, Any] | None) -> str | None:
    """Why weights quantised like this are not read, with the way out; None if they are."""
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return None
    if method != "fp8":
        reason = f" ({OTHER_METHODS[method]})" if method in OTHER_METHODS else ""
    elif not quantization.get("weight_block_size"):
        reason = " without weight_block_size (one scale for a whole tensor)"
    elif quantization.get("fmt", "e4m3") not in E4M3:
        reason = f" with fmt={quantization['fmt']!r}"
    else:
        return None
    return (
        f"quantization_config.quant_method={method!r}{reason} is not read; give one in bf16, in fp8 with "
        "weight_block_size (its experts in FP4 or not), or in mxfp4"
    )
