"""How trainer ranks tell each other that one of them failed, ahead of what all do together."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from miles.utils.errors import AnotherRankFailed, one_line

logger = logging.getLogger(__name__)

# That a rank which failed waits for the others to come and hear of it. They may be in a call that only it could end.
TELLING_SECONDS = 10.0


class Agreement:
    """Between the ranks of a gloo group; all make its calls together, in one order.

    What may fail on one rank alone is done within `alone`, and no other rank then waits for it in a collective call. A
    failure inside a collective call can't be told, since the others are in it: it is raised at once, and the driver
    ends them.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """What is done within it may fail on this rank alone; it ends as `check` does. what: for the other ranks."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        self.check(what, failure)

    def check(self, what: str, failure: Exception | None = None) -> None:
        """Return once all ranks are here, if none of them has a failure.

        Raises:
            Exception: `failure` itself where there is one, also if the others don't come.
            AnotherRankFailed: elsewhere, with the ranks that failed and what they say.
        """
        failed = torch.tensor(int(failure is not None))
        texts: list[str | None] = [None] * dist.get_world_size(self.group)
        try:
            telling = dist.all_reduce(failed, group=self.group, async_op=True)
            telling.wait(*([] if failure is None else [timedelta(seconds=TELLING_SECONDS)]))
            if not failed:
                return
            dist.all_gather_object(texts, failure and one_line(failure), group=self.group)
        except RuntimeError as error:
            if failure is None:
                raise
            logger.warning("the other ranks could not be told: %s", error)
        if failure is not None:
            raise failure
        told = "; ".join(f"trainer rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        raise AnotherRankFailed(f"{what}: {told}")

    def largest(self, number: int) -> int:
        """The largest `number` of all ranks."""
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return int(tensor)
