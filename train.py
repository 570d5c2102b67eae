"""The driver: places trainer and engines, then generates, trains, saves and hands the new weights over, step by step.

python train.py --config scripts/demo/grpo.yaml
python train.py --help
"""

import asyncio

from miles.config import RunConfig
from miles.utils.arguments import parse_args
from miles.utils.errors import ends_in_a_sentence


async def run(config: RunConfig) -> None:
    """One training run, from placement to summary."""
    # Here and not above: `--help` and a refused configuration answer without loading Ray.
    from miles.ray.batches import Batches
    from miles.ray.checkpointer import Checkpointer
    from miles.ray.handover import Handover
    from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
    from miles.ray.resume import first_rollout, nothing_left, resumed
    from miles.tracking.report import Report

    config = resumed(config)
    if reason := nothing_left(config):
        return print(reason)
    placement = create_placement_groups(config)
    rollout = await create_rollout_manager(config, placement)
    config = await rollout.resolved_config()
    if reason := nothing_left(config):  # --num-epoch, now that the prompts are counted
        await rollout.dispose()
        return print(reason)
    handover = Handover(config, rollout)
    await handover.engines_up()
    models = await create_training_models(config, placement, handover)

    checkpointer = Checkpointer(config, rollout, models.actor, models.critic, handover)
    await checkpointer.resume()
    start = first_rollout(config)
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
            del batch  # so that its shards leave the object store before the next are made
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
    """Parse the command line and run; a user's mistake ends in one sentence, anything else in its traceback."""
    with ends_in_a_sentence():
        config = parse_args()

        from miles.ray.cluster import session
        from miles.ray.failure import written_down
        from miles.utils.logs import configure_logging

        configure_logging()
        with written_down(config), session(config):
            asyncio.run(run(config))


if __name__ == "__main__":
    main()
