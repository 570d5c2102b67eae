"""What the driver makes of a call that failed on some ranks: which failure is the cause, and what a user can do."""

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ray.exceptions import RayActorError

from miles.ray.failure import inside
from miles.utils.errors import AnotherRankFailed, UserError, one_line

# What torch says on a rank whose peer has gone or does not come: gloo, NCCL, and the store that groups meet at.
_ONLY_WAITED = re.compile(
    r"/gloo/transport/|NCCL communicator was aborted|remote process exited or there was a network error"
    r"|wait timeout after \d+ms"
)
_FULL_DISK = "|".join(
    rf"{re.escape(os.strerror(number))}|os error {number}\b" for number in (errno.ENOSPC, errno.EDQUOT)
)
# By what the failure's line says; the first that fits.
_ADVICE = {
    rf"(?i){_FULL_DISK}": "the disk is full: make room on it, or name a folder on another one",
    "CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED": (
        "the GPU's memory is full: lower --max-tokens-per-gpu or --micro-batch-size, pass "
        "--recompute-granularity full, or cut the model over more GPUs (--tensor-model-parallel-size)"
    ),
    "MemoryError|can't allocate memory|Cannot allocate memory|running low on memory": (
        "the machine's memory is full: run fewer ranks on it, or keep less there (--offload-train-target disk)"
    ),
    "ActorDiedError|ActorUnavailableError": (
        "its process was ended by a signal, or its machine is gone: `dmesg` there says whether the kernel ended it for "
        "want of memory"
    ),
}


@dataclass(frozen=True)
class Failure:
    """What a call raised on one rank. who: "trainer rank 1 on 10.0.0.2"."""

    who: str
    error: Exception

    @property
    def text(self) -> str:
        """The error in one line."""
        error = inside(self.error)
        if isinstance(error, RayActorError):
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return one_line(error)

    @property
    def advice(self) -> str | None:
        """What a user can do about it, where the error does not say so itself."""
        if isinstance(inside(self.error), UserError):
            return None
        return next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, self.text)), None)

    @property
    def follows(self) -> bool:
        """Whether it only says that another rank failed, or did not come."""
        return isinstance(inside(self.error), AnotherRankFailed) or _ONLY_WAITED.search(self.text) is not None


def cause(method: str, failures: Sequence[Failure], ended: Sequence[str], grace: float) -> Exception:
    """The first failure's error, with all that is known of the other ranks as notes.

    Args:
        method: the call.
        failures: in the order of time. Those that only follow from another come last.
        ended: who had not answered `grace` seconds after the first failure.
    """
    first, *others = sorted(failures, key=lambda failure: failure.follows)
    notes = ["; ".join(part for part in (f"{first.who} failed in {method}", first.advice) if part)]
    by_text: dict[str, list[str]] = {}
    for failure in others:
        by_text.setdefault(failure.text, []).append(failure.who)
    for text, who in by_text.items():
        notes.append(f"{', '.join(who)} failed after that: {'the same' if text == first.text else text}")
    if ended:
        notes.append(f"{', '.join(ended)} did not answer within {grace:g} s of it and had to be ended")
        if first.follows:
            notes.append("so that one of those is what the others waited for")
    for note in notes:
        first.error.add_note(note)
    return first.error
