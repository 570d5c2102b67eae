"""What must never be written down: which names hold it, and a text without it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NAME = re.compile(r"((api|access|auth|private|secret|wandb)[_-]?key|token|secret|passw(or)?d|credentials?)$", re.I)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
MASK = "***"


def is_secret(name: str) -> bool:
    """Whether a flag, key or environment variable of this name holds a secret: sglang_api_key, HF_TOKEN."""
    return _NAME.search(name) is not None


def secrets_of(values: Mapping[str, Any]) -> Iterator[str]:
    """Every text that stands under a secret name in `values` or in what they hold."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from secrets_of(value)
        elif is_secret(str(name)):
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str))


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, without those of secret names, and without the user and password of addresses."""
    return {str(name): _open(value) for name, value in values.items() if not is_secret(str(name))}


def _open(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list):
        return [_open(part) for part in value]
    return masked(value, ()) if isinstance(value, str) else value


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text with stars for each of the secrets, and for the user and password of an address."""
    for secret in sorted({secret for secret in secrets if secret}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _IN_ADDRESS.sub(MASK, text)
