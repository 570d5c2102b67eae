"""Count in equals count out: what became of every group that a rollout took."""

from collections import Counter
from collections.abc import Collection
from enum import StrEnum

from miles.rollout.sample_buffer import Group, index_of
from miles.utils.errors import UserError


class Outcome(StrEnum):
    """What became of a group that was taken from the prompts or out of the buffer."""

    TRAINED = "trained"
    SURPLUS = "surplus"
    UNFINISHED = "unfinished"
    FILTERED = "filtered"
    STALE = "stale"
    DROPPED = "dropped"
    FAILED = "failed"

    @property
    def is_stored(self) -> bool:
        """Whether the group is in the buffer now; it is gone otherwise."""
        return self in (Outcome.SURPLUS, Outcome.UNFINISHED, Outcome.STALE)


class Ledger:
    """Books every group as taken and, once, with an outcome; `close` compares the sums at the end of each rollout."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._received = 0  # groups that ever came: from the prompts, or with a loaded state
        self._gone = 0
        self._start_rollout()

    def _start_rollout(self) -> None:
        self._open_before = len(self._open)
        self._began = {"new": 0, "from_buffer": 0}
        self._outcomes: Counter[Outcome] = Counter()

    def take(self, group: Group, *, new: bool) -> None:
        """Book a group that comes from the prompts (`new`), or out of the buffer.

        Raises: ValueError if a group of the same index is being worked on.
        """
        index = index_of(group)
        if index in self._open:
            raise UserError(
                f"the data source handed out group_index {index} twice; each group must have one of its own"
            )
        self._open.add(index)
        self._began["new" if new else "from_buffer"] += 1
        self._received += new

    def settle(self, group: Group, outcome: Outcome) -> None:
        """Book the outcome of a group that was taken."""
        self._open.remove(index_of(group))
        self._outcomes[outcome] += 1
        self._gone += not outcome.is_stored

    def load(self, groups: int) -> None:
        """Book groups that came with a loaded state into the buffer."""
        self._received += groups

    def close(self, running: Collection[int], stored: int) -> dict[str, float]:
        """Compare the books with what is there, start those of the next rollout, and return `rollout/groups/*`.

        Args:
            running: indices of the groups being worked on.
            stored: number of groups in the buffer.

        Raises:
            RuntimeError: a group is lost or doubled.
        """
        there = set(running)
        if there != self._open or len(there) != len(running):
            raise RuntimeError(
                f"{len(self._open)} groups were taken and not finished, and {len(running)} are being worked on; they "
                f"differ in {sorted(self._open ^ there)[:10]}: a group is lost or doubled"
            )
        begun, settled = self._open_before + sum(self._began.values()), self._outcomes.total() + len(self._open)
        if begun != settled or self._received != self._gone + stored + len(self._open):
            raise RuntimeError(
                f"a group is lost or doubled: this rollout had {begun} and knows what became of {settled}; "
                f"{self._received} ever came, {self._gone} are gone, {stored} in the buffer, {len(self._open)} in work"
            )
        metrics = {f"rollout/groups/{name}": float(count) for name, count in self._began.items()}
        metrics |= {f"rollout/groups/{outcome}": float(self._outcomes[outcome]) for outcome in Outcome}
        metrics["rollout/groups/in_flight"] = float(len(self._open))
        self._start_rollout()
        return metrics
