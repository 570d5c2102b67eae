"""The driver: places trainer and engines, then generates, trains, saves and hands the new weights over, step by step.

    python train.py --config scripts/demo/grpo.yaml
    python train.py --help
"""

import asyncio

from miles.config import RunConfig
from miles.utils.arguments import parse_args


async def run(config: RunConfig) -> None:
    """One training run, from placement to summary."""
    # Here and not above: `--help` and a refused configuration answer without loading Ray.
    from miles.ray.checkpointer import Checkpointer
    from miles.ray.handover import Handover
    from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
    from miles.tracking.report import Report

    placement = create_placement_groups(config)
    rollout = await create_rollout_manager(config, placement)
    config = await rollout.resolved_config.remote()
    trainer = await create_training_models(config, placement)
    checkpointer = Checkpointer(config, rollout, trainer)
    handover = Handover(config, rollout, trainer)

    start = await checkpointer.resume()
    report = Report(config, start)
    await handover.initial_sync()
    await report.evaluate_before_training(rollout)
    for rollout_id in range(start, config.num_rollout):
        batch = await rollout.generate.remote(rollout_id)
        metrics = dict(batch.metrics)
        if config.needs_trainer:
            with report.timer("train"):
                metrics |= await trainer.train(rollout_id, batch.shards)
            with report.timer("save"):
                await checkpointer.save_if_due(rollout_id)
            metrics |= await handover.to_rollout()
        await report.evaluate_if_due(rollout, rollout_id)
        report.step(rollout_id, metrics)
    report.summary()
    await rollout.dispose.remote()


def main() -> None:
    """Parse the command line and run."""
    config = parse_args()

    from miles.ray.cluster import session

    with session(config):
        asyncio.run(run(config))


if __name__ == "__main__":
    main()
