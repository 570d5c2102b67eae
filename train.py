"""The driver: places trainer and engines, then generates, trains, saves and hands the new weights over, step by step.

python train.py --config scripts/demo/grpo.yaml
python train.py --help
"""

from miles.config import RunConfig
from miles.tracking.sinks import Sinks, trackers
from miles.utils.arguments import parse_args
from miles.utils.errors import ends_in_a_sentence


async def run(config: RunConfig, sinks: Sinks) -> None:
    """One training run, from placement to summary, whose metrics go to `sinks` too."""
    # Here and not above: `--help` and a refused configuration answer without loading Ray.
    from miles.ray.batches import Batches
    from miles.ray.calendar import due, rollouts
    from miles.ray.checkpointer import Checkpointer
    from miles.ray.evaluations import Evaluations
    from miles.ray.handover import Handover
    from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
    from miles.ray.resume import first_rollout, nothing_left, resumed
    from miles.ray.train.training import Training
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
    models = create_training_models(config, placement)
    handover = Handover(config, rollout, models)
    await handover.build_models()

    checkpointer = Checkpointer(config, rollout, models, handover)
    version = await checkpointer.resume()
    start = first_rollout(config)
    report = Report(config, start, sinks)
    batches = Batches(config, rollout, report)
    training = Training(config, models, handover, checkpointer, report)
    evaluations = Evaluations(config, rollout, report)
    await handover.initial_sync(version)
    await evaluations.before_training(start)
    report.begin()
    for rollout_id in rollouts(config, start):
        today = due(config, rollout_id)
        batch = await batches.next(rollout_id)
        metrics = dict(batch.metrics)
        if config.needs_trainer:
            await handover.to_training()
            metrics |= await training.step(rollout_id, batch.shards)
            del batch  # so that its shards leave the object store before the next are made
            with report.timer("save"):
                if today.save:
                    await checkpointer.save(rollout_id)
        await batches.settle()
        if today.sync:
            metrics |= await handover.to_rollout()
        if today.evaluation:
            await evaluations.after(rollout_id)
        report.step(rollout_id, metrics)
    report.summary()
    await handover.disconnect()
    await rollout.dispose()


def main() -> None:
    """Parse the command line and run; a user's mistake ends in one sentence, anything else in its traceback."""
    with ends_in_a_sentence():
        config = parse_args()

        import asyncio

        from miles.ray.cluster import session
        from miles.ray.failure import written_down
        from miles.utils.logs import configure_logging

        configure_logging()
        with written_down(config), trackers(config) as sinks, session(config):
            asyncio.run(run(config, sinks))


if __name__ == "__main__":
    main()
