"""What the driver gets from the hand-over: metrics, log lines, versions, and errors at the wrong time."""

import logging

import pytest

from miles.config import RunConfig
from miles.ray.handover import Handover
from miles.ray.train.models import TrainingModels
from miles.residency.plan import Party, Region
from miles.residency.state import ResidencyError
from miles.weight_sync.target import EngineTarget

GB = 10**9
BYTES = {Region.CUDA_GRAPH: 0, Region.KV_CACHE: 3 * GB, Region.WEIGHTS: GB}


def metrics_of(moves):
    """What a party reports of a call: engines by their regions' sizes, a trainer of a sleep and of its groups."""
    leaves, regions = moves[0].leaves, [move.region for move in moves]
    if moves[0].party is Party.ENGINE:
        name, size = "offload_rollout" if leaves else "onload_rollout", sum(BYTES[region] for region in regions)
        return {f"perf/{name}_time": size / GB / (8 if leaves else 2), f"perf/{name}_bytes": size}
    metrics = {}
    if Region.WEIGHTS in regions:
        name, seconds = ("sleep", 0.5) if leaves else ("wake_up", 0.0)
        metrics = {f"perf/{name}_time": seconds, f"perf/{name}_bytes": 20 * GB}
    if Region.COMM in regions:
        name, seconds = ("destroy", 0.125) if leaves else ("reload", 0.25)
        metrics[f"perf/{name}_process_groups_time"] = seconds
    return metrics


class Service:
    """Records calls, moves as their direction and regions; `broken` names the verb that raises."""

    def __init__(self):
        self.calls, self.broken = [], None

    async def move(self, moves):
        self.calls.append(("leaves" if moves[0].leaves else "returns", *(str(move.region) for move in moves)))
        return metrics_of(moves)

    def __getattr__(self, verb):
        async def call(*arguments):
            self.calls.append((verb, *arguments))
            if verb == self.broken:
                raise OSError(f"{verb} failed")
            match verb:
                case "engine_urls":
                    return ["http://first", "http://second"]
                case "update_weights":
                    return {"perf/update_weights_time": 2.0}
                case "clear_memory":
                    return {"perf/clear_memory_time": 0.125}
            return {}

        return call


def config(**changes):
    values = {
        "colocate": True,
        "offload_train": True,
        "offload_rollout": True,
        "rollout_num_gpus": 4,
        "rollout_num_gpus_per_engine": 2,
        "actor_num_gpus_per_node": 4,
    }
    return RunConfig.model_construct(**(RunConfig.model_construct().model_dump() | values | changes))


async def started(trainer=None, **changes):
    """A hand-over after its first sync, and the trainer."""
    trainer, run = trainer or Service(), config(**changes)
    handover = Handover(run, Service(), TrainingModels(trainer, Service() if run.use_critic else None))
    await handover.build_models()
    await handover.initial_sync(0)
    return handover, trainer


# What the engines take in a step.
ENGINES = {
    "perf/offload_rollout_time": 0.5,
    "perf/offload_rollout_bytes": 4 * GB,
    "perf/offload_rollout_gb_per_s": 8.0,
    # Two calls: 1 GB in 0.5 s and 3 GB in 1.5 s.
    "perf/onload_rollout_time": 2.0,
    "perf/onload_rollout_bytes": 4 * GB,
    "perf/onload_rollout_gb_per_s": 2.0,
}


@pytest.mark.parametrize(("critic", "peak"), [(False, "cpu"), (False, "gpu"), (True, "cpu")])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
async def test_metrics_of_a_step(critic, peak, tensor_parallel):
    """Of all moves of the step, and the same in the next; with a critic two models sleep and wake."""
    estimator = "ppo" if critic else "grpo"
    more = {"advantage_estimator": estimator, "tensor_model_parallel_size": tensor_parallel}
    handover, _ = await started(colocate_memory_peak_device=peak, **more)
    models = 2 if critic else 1
    clear = {"perf/clear_memory_time": 0.125} if peak == "gpu" else {}
    for _ in range(2):
        await handover.to_training()
        if critic:
            await handover.to_actor()
        assert await handover.to_rollout() == {
            **(ENGINES | clear),
            # No speed where no time was measured.
            "perf/wake_up_time": 0.0,
            "perf/wake_up_bytes": models * 20 * GB,
            "perf/reload_process_groups_time": models * 0.25,
            "perf/sleep_time": models * 0.5,
            "perf/sleep_bytes": models * 20 * GB,
            "perf/sleep_gb_per_s": 40.0,
            "perf/destroy_process_groups_time": models * 0.125,
            "perf/update_weights_time": 2.0,
        }


async def test_a_step_of_the_critic_alone():
    """The actor's weights are sent again where the engines have dropped theirs, and the actor sleeps on."""
    handover, actor = await started(advantage_estimator="ppo", tensor_model_parallel_size=2)
    actor.calls.clear()
    await handover.to_training()
    handover.before_critic_save()
    with pytest.raises(ResidencyError, match="^actor comm is dropped: phase before_save needs it gpu$"):
        handover.before_save()
    metrics = await handover.to_rollout()
    assert (metrics["perf/sleep_bytes"], metrics["perf/reload_process_groups_time"]) == (20 * GB, 2 * 0.25)
    assert actor.calls == [("returns", "comm"), ("update_weights", 2), ("leaves", "comm")]
    # And then one of both.
    await handover.to_training()
    await handover.to_actor()
    handover.before_save()
    with pytest.raises(ResidencyError, match="^critic comm is dropped: phase before_critic_save needs it gpu$"):
        handover.before_critic_save()
    assert (await handover.to_rollout())["perf/sleep_bytes"] == 40 * GB
    come, go = ("returns", "comm", "optimizer", "weights", "grads"), ("leaves", "grads", "weights", "optimizer")
    assert actor.calls[3:] == [come, go, ("update_weights", 3), ("leaves", "comm")]


async def test_each_sync_has_a_version_of_its_own_and_a_failed_one_is_repeated_with_the_next():
    handover, trainer = await started()
    await handover.to_training()
    trainer.broken = "update_weights"
    with pytest.raises(OSError):
        await handover.to_rollout()
    with pytest.raises(ResidencyError, match="^phase after_generate can't come: phase after_train has not ended, "):
        await handover.to_training()
    trainer.broken = None
    assert (await handover.to_rollout())["perf/sleep_time"] == 0.5  # of before the failure
    assert [call for call in trainer.calls if call[0] == "update_weights"] == [("update_weights", v) for v in (1, 2, 3)]
    assert [call[0] for call in trainer.calls].count("leaves") == 2


@pytest.mark.parametrize("broken", ["update_weights", "hold"])
async def test_engines_that_never_rest_go_on_after_a_failed_sync(broken):
    handover, trainer = await started(colocate=False, fully_async=True, offload_train=False, offload_rollout=False)
    trainer.broken = handover.rollout.broken = broken
    handover.rollout.calls.clear()
    with pytest.raises(OSError, match=broken):
        await handover.to_rollout()
    assert [handover.rollout.calls[0], handover.rollout.calls[-1]] == [("hold",), ("release",)]


async def test_a_failed_sync_is_explained_by_a_server_that_ended():
    handover, trainer = await started()
    trainer.broken = "update_weights"
    await handover.to_training()
    handover.rollout.broken = "check_engines"
    with pytest.raises(OSError, match="check_engines failed") as caught:
        await handover.to_rollout()
    assert str(caught.value.__context__) == "update_weights failed"


async def test_saving_at_the_wrong_time():
    handover, _ = await started()
    with pytest.raises(ResidencyError, match="^actor comm is dropped: phase before_save needs it gpu$"):
        handover.before_save()
    await handover.to_training()
    handover.before_save()


async def test_set_up_is_logged_with_what_moved(caplog):
    with caplog.at_level(logging.INFO, logger="miles.ray.handover"):
        await started(colocate_memory_peak_device="gpu")
    assert [record.getMessage() for record in caplog.records] == [
        "engines_up: engine cuda_graph leaves, engine kv_cache leaves: 0.0 s, 3.00 GB",
        "trainer_built: actor comm leaves, actor grads leaves, actor weights leaves, actor optimizer leaves: 0.0 s, "
        "20.00 GB",
        "first_sync: sync, engine kv_cache returns, engine cuda_graph returns: 0.0 s, 3.00 GB",
    ]


async def test_nothing_is_logged_where_nothing_moves(caplog):
    with caplog.at_level(logging.INFO, logger="miles.ray.handover"):
        await started(offload_train=False)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["engines_up", "first_sync"]
    assert "first_sync: actor caches cleared, engine weights returns, sync" in caplog.text


@pytest.mark.parametrize(
    ("changes", "sources"),
    [
        ({"colocate": True}, ([0, 1], [2, 3])),
        ({"colocate": False}, (None, None)),
        ({"colocate": True, "actor_num_gpus_per_node": 2}, ([0, 1], None)),
    ],
)
async def test_a_colocated_engine_reads_from_the_ranks_on_its_bundles_and_a_remote_one_from_none(changes, sources):
    _, trainer = await started(offload_train=False, offload_rollout=False, **changes)
    urls = ("http://first", "http://second")
    targets = [EngineTarget(url, 2, ranks) for url, ranks in zip(urls, sources, strict=True)]
    assert trainer.calls == [("init",), ("connect", targets), ("update_weights", 1)]


@pytest.mark.parametrize("lone", [{"debug_rollout_only": True}, {"loss_type": "sft_loss"}, {"debug_train_only": True}])
async def test_nothing_happens_where_a_side_is_missing(lone):
    handover, trainer = await started(**lone)
    await handover.to_training()
    assert await handover.to_rollout() == {}
    handover.before_save()
    assert trainer.calls == ([("init",)] if handover.config.needs_trainer else []) and handover.rollout.calls == []
    assert handover.version == 0
