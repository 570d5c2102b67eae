"""A configuration in the making, in which some values are not known yet."""

from collections.abc import Mapping
from typing import Any

from miles.config.layout import Layout


class Undetermined(Exception):
    """Raised on reading a value that was given wrongly, is missing, or follows from such a one."""


class Values(Layout):
    """The fields of RunConfig, read as attributes. Reading a field that is not known raises Undetermined."""

    def __init__(self, known: Mapping[str, Any]):
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if name not in self._known:
            raise Undetermined(name)
        return self._known[name]
