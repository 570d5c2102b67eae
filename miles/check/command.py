"""`train.py --check`: print the ledger, and say by the exit status whether the run fits."""

from miles.check.hardware import hardware_named
from miles.check.ledger import ledger_of
from miles.check.report import report
from miles.config import RunConfig
from miles.utils.errors import UserError


def check(config: RunConfig, hardware: str | None) -> int:
    """Print what the run needs on machines of this name (None: on this one); 0 if it fits, 1 if it does not.

    Raises:
        UserError: hardware or model are unknown, or the run is one for a CPU.
    """
    if config.device == "cpu":
        raise UserError("--check counts the memory of GPUs and --device is cpu: leave --device cpu out")
    ledger = ledger_of(config, hardware_named(hardware))
    print(report(ledger))
    return 1 if ledger.shortages else 0
