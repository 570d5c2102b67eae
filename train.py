"""The driver: places trainer and engines, then generates, trains, saves and hands the new weights over, step by step.

python train.py --config scripts/demo/grpo.yaml
python train.py --help
"""

import asyncio
import sys

from miles.config import RunConfig
from miles.utils.arguments import parse_args


async def run(config: RunConfig) -> None:
    """One training run, from placement to summary."""
    # Here and not above: `--help` and a refused configuration answer without loading Ray.
    from miles.ray.batches import Batches
    from miles.ray.checkpointer import Checkpointer
    from miles.ray.handover import Handover
    from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
    from miles.tracking.report import Report

    placement = create_placement_groups(config)
    rollout = await create_rollout_manager(config, placement)
    config = await rollout.resolved_config()
    handover = Handover(config, rollout)
    await handover.engines_up()
    models = await create_training_models(config, placement, handover)

    checkpointer = Checkpointer(config, rollout, models.actor, models.critic, handover)
    start = await checkpointer.resume()
    report = Report(config, start)
    batches = Batches(config, rollout, report)
    await handover.initial_sync()
    handover.before_evaluation()
    await report.evaluate_before_training(rollout)
    for rollout_id in range(start, config.num_rollout):
        batch = await batches.next(rollout_id)
        metrics = dict(batch.metrics)
        if config.needs_trainer:
            await handover.to_training()
            metrics |= await models.train(rollout_id, batch.shards, checkpointer, report)
            with report.timer("save"):
                await checkpointer.save_if_due(rollout_id)
        await batches.settle()
        # What is saved or evaluated is synced, whatever the interval.
        if handover.sync_is_due(rollout_id) or checkpointer.is_due(rollout_id) or report.evaluation_is_due(rollout_id):
            metrics |= await handover.to_rollout()
        handover.before_evaluation()
        await report.evaluate_if_due(rollout, rollout_id)
        report.step(rollout_id, metrics)
    report.summary()
    await handover.disconnect()
    await rollout.dispose()


def main() -> None:
    """Parse the command line and run; a user's mistake ends in one sentence and exit code 1."""
    config = parse_args()

    from ray.exceptions import RayTaskError

    from miles.ray.cluster import session
    from miles.utils.logs import configure_logging

    configure_logging()
    try:
        with session(config):
            asyncio.run(run(config))
    except ValueError as error:
        # An actor's ValueError arrives wrapped, with the traceback of its process as its text.
        sys.exit(f"error: {error.cause if isinstance(error, RayTaskError) else error}")


if __name__ == "__main__":
    main()
