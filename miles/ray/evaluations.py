"""When a run is evaluated: before its first rollout, after some of them, or alone."""

from miles.config import RunConfig
from miles.ray.calendar import is_evaluated_first
from miles.ray.rollout.client import RolloutClient
from miles.tracking.report import Report


class Evaluations:
    """Has the engines evaluated with the weights that they hold, and hands the metrics to the report.

    Args:
        config: the run's configuration, with num_rollout set.
        rollout: client of the RolloutManager.
        report: of the run.
    """

    def __init__(self, config: RunConfig, rollout: RolloutClient, report: Report):
        self.config = config
        self.rollout = rollout
        self.report = report

    async def before_training(self, first_rollout: int) -> None:
        """Evaluate a new run that asks for evaluations. With --num-rollout 0 this is all of the run.

        Such an evaluation alone is that of the step whose weights the engines have.

        Args:
            first_rollout: that this process starts with.
        """
        if self.config.num_rollout == 0:
            step = max(first_rollout - 1, 0)
            with self.report.timer("eval"):
                metrics = await self.rollout.evaluate(step, False)
            self.report.evaluation(step, metrics)
        elif is_evaluated_first(self.config, first_rollout):
            self.report.before_training(await self.rollout.evaluate(0, True))

    async def after(self, rollout_id: int) -> None:
        """Evaluate after `rollout_id`; the metrics are its step's."""
        with self.report.timer("eval"):
            self.report.add(await self.rollout.evaluate(rollout_id, False))
