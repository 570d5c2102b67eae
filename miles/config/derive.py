"""Values that follow from others. Each has a reason, which `--print-config` shows."""

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from miles.config.paths import absolute
from miles.config.run_config import SECTIONS
from miles.config.values import Undetermined, Values

DERIVATIONS = [derivation for section in SECTIONS for derivation in section.derivations()]


def derive(known: Mapping[str, Any], now: datetime) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with all that follows from them, and the reason for each that is new or replaced.

    `known` lacks what was given wrongly; what would follow from it is then taken out too.
    """
    values, reasons = dict(known), {}
    if values.get("run_dir", "") is None:
        # Some characters of its own: runs that start in the same second, on any machines, share no folder.
        values["run_dir"] = absolute(f"runs/{now:%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:8]}")
        reasons["run_dir"] = "the time of the start, and a number of its own"
    for names, function in DERIVATIONS:
        try:
            derived = list(function(Values(values)))
        except Undetermined:
            for name in names:
                if name in values and values[name] is None:
                    del values[name]
            continue
        for name, value, reason in derived:
            assert name in names, f"{function} derives {name} without declaring it"
            values[name], reasons[name] = value, reason
    return values, reasons
