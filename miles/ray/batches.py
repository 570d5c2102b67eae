"""Batches: what the trainer learns from, rollout by rollout, made in turns or while it still trains on the last one."""

import asyncio
from typing import TYPE_CHECKING

from miles.config import RunConfig
from miles.ray.calendar import due
from miles.ray.rollout.client import RolloutClient
from miles.tracking.report import Report

if TYPE_CHECKING:
    # Its module imports torch, which the driver does without.
    from miles.ray.rollout.training_data import RolloutResult


class Batches:
    """The batch of each rollout, in order.

    | schedule | a rollout is generated |
    | --- | --- |
    | in turns | when it is asked for |
    | --one-step-ahead | once the one before it has been taken, while that is trained on |
    | --fully-async | all the time: what is asked for is the oldest that is finished |

    Args:
        config: the run's configuration, with num_rollout set.
        rollout: client of the RolloutManager.
        report: where the waiting for a batch is counted, if anything else happens meanwhile.
    """

    def __init__(self, config: RunConfig, rollout: RolloutClient, report: Report):
        self.config = config
        self.rollout = rollout
        self.report = report
        self._ahead: asyncio.Future[RolloutResult] | None = None

    async def next(self, rollout_id: int) -> "RolloutResult":
        """The batch of `rollout_id`; one step ahead, the next one is begun."""
        if not self.config.overlaps:
            return await self.rollout.generate(rollout_id)
        with self.report.timer("wait"):
            batch = await (self._begin(rollout_id) if self._ahead is None else self._ahead)
        more = self.config.one_step_ahead and due(self.config, rollout_id).next_rollout
        self._ahead = self._begin(rollout_id + 1) if more else None
        return batch

    async def settle(self) -> None:
        """Wait for the batch that was begun ahead: after it the engines are idle, and get new weights or evaluate.

        So all of a batch is written with one version of the weights, except in a fully asynchronous run.
        """
        if self._ahead is not None:
            with self.report.timer("wait"):
                await self._ahead

    def _begin(self, rollout_id: int) -> "asyncio.Future[RolloutResult]":
        return asyncio.ensure_future(self.rollout.generate(rollout_id))
