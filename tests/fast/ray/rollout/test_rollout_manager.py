import asyncio
import json
import os
import signal
import time

import numpy as np
import psutil
import pytest
import ray

from miles.backends.sglang_utils.client import SGLangClient
from miles.backends.sglang_utils.engine import SGLangEngine
from miles.backends.sglang_utils.supervisor import group_members
from miles.ray import placement_group as placing
from miles.ray.rollout.rollout_manager import RolloutManager, _check_complete
from miles.rewards import RewardCounts, check_errors
from miles.utils.arguments import parse_args
from miles.utils.types import Sample

ALL_STAY = ("--no-offload-train", "--no-offload-rollout")


@pytest.fixture(scope="module")
def local_ray():
    """A Ray of two logical CPUs, without a dashboard."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def servers_of(folder):
    """Ids of the processes that were started with a path in `folder`: servers, not their workers (they have titles)."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "sglang" in (line := " ".join(process.info["cmdline"] or ())) and str(folder) in line:
            found.append(process.pid)
    return found


def test_bad_prompts_are_refused_on_construction(engine_flags, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "a", "label": "1"}\n{"input": "b"}\n')
    flags = [str(path) if flag.endswith("prompts.jsonl") else flag for flag in engine_flags]
    with pytest.raises(ValueError, match="bad.jsonl:2"):
        RolloutManager(parse_args(flags), [])
    good = parse_args([*engine_flags, "--eval-interval", "1", "--eval-prompt-data", "held-out", str(path)])
    with pytest.raises(ValueError, match="bad.jsonl:2"):
        RolloutManager(good, [])


def test_supervised_rollouts_need_no_engine(engine_flags, local_ray, tmp_path):
    flags = [*engine_flags, "--loss-type", "sft_loss", "--global-batch-size", "8"]
    manager = RolloutManager(parse_args(flags), [])

    async def go():
        await manager.start()
        first = await manager.generate(0)
        await manager.save(tmp_path)
        second = await manager.generate(1)
        resumed = RolloutManager(parse_args(flags), [])
        await resumed.load(tmp_path)
        again = await resumed.generate(1)
        await manager.dispose()
        return first, second, again

    first, second, again = asyncio.run(go())
    batches = [ray.get(result.shards)[0].batch for result in (first, second, again)]
    assert [len(batch) for batch in batches] == [16, 16, 16]
    assert np.array_equal(batches[1]["tokens"], batches[2]["tokens"])
    assert np.array_equal(batches[1]["sample_indices"], batches[2]["sample_indices"])
    assert batches[0].row("tokens", 0).tolist() == [97, 48, 259]
    assert "perf/rollout_time" in first.metrics and "rewards" not in batches[0]


def test_epochs_become_rollouts(engine_flags):
    flags = ["--num-epoch" if flag == "--num-rollout" else flag for flag in engine_flags]
    config = asyncio.run(RolloutManager(parse_args(flags), []).resolved_config())
    assert config.num_rollout == 2
    ppo = ("--advantage-estimator", "ppo", "--num-critic-only-steps")
    assert asyncio.run(RolloutManager(parse_args([*flags, *ppo, "1"]), []).resolved_config()).num_rollout == 2
    with pytest.raises(ValueError, match="2 leaves none of the 2 rollouts of --num-epoch 1 to the actor"):
        asyncio.run(RolloutManager(parse_args([*flags, *ppo, "2"]), []).resolved_config())
    too_big = [("9" if flags[i - 1] == "--rollout-batch-size" else flag) for i, flag in enumerate(flags)]
    with pytest.raises(ValueError, match="is 8 prompts, fewer than one rollout takes"):
        asyncio.run(RolloutManager(parse_args(too_big), []).resolved_config())


def test_a_failed_start_ends_the_other_engines_too(engine_config, local_ray, tiny_checkpoint, tmp_path):
    good = tmp_path / "good"
    good.symlink_to(tiny_checkpoint)
    configs = [
        engine_config.model_copy(update={"hf_checkpoint": str(tmp_path / name), "run_dir": str(tmp_path)})
        for name in ("good", "nothing")
    ]
    engines = [ray.remote(SGLangEngine).options(num_cpus=0).remote(config, i, []) for i, config in enumerate(configs)]
    manager = RolloutManager(engine_config, engines)
    groups = set()

    async def start():
        starting = asyncio.create_task(manager.start())
        while not starting.done():
            groups.update(os.getpgid(pid) for pid in servers_of(tmp_path))
            await asyncio.sleep(0.1)
        await starting

    with pytest.raises(Exception, match="exited with code 1(.|\n)*engine_1.log"):
        asyncio.run(start())
    assert len(groups) == 2
    deadline = time.monotonic() + 10
    while any(map(group_members, groups)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [group_members(group) for group in groups] == [[], []]


def test_generate_evaluate_and_death_of_the_server(engine_flags, local_ray, tiny_checkpoint, prompt_file, tmp_path):
    model = tmp_path / "model"
    model.symlink_to(tiny_checkpoint)
    config = parse_args(
        [
            *(str(model) if flag == str(tiny_checkpoint) else flag for flag in engine_flags),
            *("--run-dir", str(tmp_path), "--eval-interval", "1", "--eval-prompt-data", "held-out", str(prompt_file)),
            *("--n-samples-per-eval-prompt", "2", "--eval-temperature", "0", "--global-batch-size", "8"),
        ]
    )
    # As on a cluster, whose other nodes reach the server.
    address = ray.util.get_node_ip_address()
    engine = ray.remote(SGLangEngine).options(num_cpus=0).remote(config, 0, [], address, range(21000, 21100))
    manager = ray.remote(RolloutManager).options(num_cpus=0).remote(config, [engine])
    ray.get(manager.start.remote())
    (url,) = ray.get(manager.engine_urls.remote())
    host, port = url.removeprefix("http://").rsplit(":", 1)
    assert host == address != "127.0.0.1" and 21000 <= int(port) < 21100

    result = ray.get(manager.generate.remote(0))
    (shard,) = ray.get(result.shards)
    assert len(shard.batch) == 16 and len(shard.steps) == 2
    assert sorted(shard.batch["sample_indices"]) == list(range(16))
    assert len(shard.batch["rollout_log_probs"]) == shard.batch.response_lengths.sum() > 0
    assert (shard.batch["rollout_log_probs"] < 0).all()
    assert 0 <= result.metrics["rollout/raw_reward"] <= 1
    assert result.metrics["rollout/reward_error_ratio"] == 0
    assert result.metrics["perf/tokens_per_gpu_per_sec"] > 0

    metrics = ray.get(manager.evaluate.remote(0))
    assert 0 <= metrics["eval/held-out"] <= 1 and metrics["eval/held-out/response_len/max"] <= 8
    ray.get(manager.save.remote(tmp_path))
    assert json.loads((tmp_path / "data_source.json").read_text())["sample_index"] == 16

    members = group_members(os.getpgid(servers_of(tmp_path)[0]))
    assert len(members) >= 3
    # By its title: torch may rename a process's first thread, and with it the process.
    titles = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in members}
    (scheduler,) = (pid for pid, title in titles.items() if title.startswith("sglang::scheduler"))
    request = manager.generate.remote(1)
    os.kill(scheduler, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(Exception, match=r"the server \(pid \d+\) (.|\n)*Last lines of .*engine_0.log"):
        ray.get(request, timeout=60)
    assert time.monotonic() - start < 15
    ray.get(manager.dispose.remote())
    ray.get(manager.dispose.remote())
    assert not [pid for pid in members if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


async def test_external_engines_behind_a_router(engine_flags, engine_server, local_ray, tmp_path):
    """The samples are those of the engine alone; the router ends with the run, the engine does not."""
    flags = [flag for flag in engine_flags if flag not in ("--colocate", *ALL_STAY)]
    flags += ["--rollout-external-engine-addrs", engine_server.removeprefix("http://"), "--run-dir", str(tmp_path)]
    flags += ["--rollout-request-retries", "0"]
    batches, logs = [], tmp_path / "logs"
    for more in ([], ["--sglang-router-policy", "cache_aware"]):
        config = parse_args([*flags, *more])
        # As create_rollout_manager does it; nothing is placed.
        manager = RolloutManager(config, placing._engines(config, None), placing._router(config))
        await manager.start()
        assert await manager.engine_urls() == [engine_server]
        result = await manager.generate(0)
        assert result.metrics["perf/tokens_per_gpu_per_sec"] > 0
        batches.append(ray.get(result.shards)[0].batch)
        assert logs.exists() == bool(more)
        if more:
            router = os.getpgid(servers_of(engine_server)[0])
            os.kill(router, signal.SIGKILL)
            while group_members(router):
                await asyncio.sleep(0.05)
            with pytest.raises(Exception, match="router.log"):
                await manager.generate(1)
        await manager.dispose()
        await manager.dispose()
    assert [path.name for path in logs.iterdir()] == ["router.log"]  # no engine was started
    assert np.array_equal(batches[0]["tokens"], batches[1]["tokens"])
    assert np.abs(batches[0]["rollout_log_probs"] - batches[1]["rollout_log_probs"]).max() < 1e-4
    async with SGLangClient(engine_server) as client:
        await client.health()

    config = parse_args([*flags, "--bf16"])
    with pytest.raises(ValueError) as caught:
        await RolloutManager(config, placing._engines(config, None)).start()
    assert str(caught.value.cause).endswith("start it with --dtype bfloat16")


OPD = ("--use-opd", "--opd-type", "sglang", "--opd-teacher-urls")


async def test_distillation_from_a_teacher_without_a_reward(engine_flags, engine_server, local_ray, tmp_path):
    """The engine is its own teacher, so the divergence is zero; nothing is said about rewards."""
    dropped = ("--colocate", *ALL_STAY, "--rm-type", "exact", "--label-key", "label")
    flags = [flag for flag in engine_flags if flag not in dropped]
    flags += ["--rollout-external-engine-addrs", engine_server.removeprefix("http://"), "--run-dir", str(tmp_path)]
    config = parse_args([*flags, *OPD, engine_server])
    manager = RolloutManager(config, placing._engines(config, None))
    await manager.start()
    result = await manager.generate(0)
    await manager.dispose()
    batch = ray.get(result.shards)[0].batch
    assert np.abs(batch["teacher_log_probs"] - batch["rollout_log_probs"]).max() < 1e-4
    assert (batch["rewards"] == 0).all() and batch["loss_masks"].all()
    difference = result.metrics["rollout/teacher_log_probs"] - result.metrics["rollout/rollout_log_probs"]
    assert abs(difference) < 1e-4
    assert not [name for name in result.metrics if "reward" in name]


async def test_a_useless_teacher_is_refused_before_engines_start(engine_flags, local_ray, unused_tcp_port, tmp_path):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    config = parse_args([*engine_flags, *OPD, url, "--run-dir", str(tmp_path)])
    engine = ray.remote(SGLangEngine).options(num_cpus=0).remote(config, 0, [])
    with pytest.raises(ValueError, match=f"the teacher {url} .--opd-teacher-urls. can't be asked"):
        await RolloutManager(config, [engine]).start()
    assert not (tmp_path / "logs").exists()


async def test_the_teacher_looks_at_a_group_while_it_is_rewarded(engine_flags, monkeypatch):
    """Reward and teacher wait for each other: neither alone can end. The error of one ends the other."""
    config = parse_args([*engine_flags, *OPD, "http://nowhere:1"])
    manager = RolloutManager(config, [])
    looks, ended = asyncio.Event(), []

    class Generator:
        async def run(self, groups, sampling, finish):
            for group in groups:
                await finish(group)

    class Waiting:
        def __init__(self, error=None):
            self.error = error

        async def score(self, group):
            looks.set()
            try:
                await (asyncio.sleep(0) if self.error is None else asyncio.sleep(60))
            finally:
                ended.append(len(group))

    async def reward(config, group, evaluation):
        await asyncio.wait_for(looks.wait(), 5)
        if fails:
            raise ValueError("reward")
        return RewardCounts(len(group), 0, 0, None)

    manager._generator = Generator()
    monkeypatch.setattr("miles.ray.rollout.rollout_manager.compute_rewards", reward)
    fails = False
    assert await manager._sample_and_reward([[Sample(), Sample()]], None, "", Waiting()) == 0
    fails = True
    looks.clear()
    with pytest.raises(ValueError, match="reward"):
        await manager._sample_and_reward([[Sample()]], None, "", Waiting("endless"))
    await asyncio.sleep(0)
    assert ended == [2, 1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("grpo", [0.70710, 0.70710, -0.70710, 0, 0]),
        ("gspo --disable-grpo-std-normalization", [1, 1, -1, 0, 0]),
        ("dr_grpo", [1, 1, -1, 0, 0]),
        ("rloo", [2, 2, -2, 0, 0]),
        ("ppo", [3, 3, 1, 5, 0]),
        ("reinforce_plus_plus", [3, 3, 1, 5, 0]),
        ("grpo --disable-rewards-normalization", [3, 3, 1, 5, 0]),
    ],
)
def test_rewards_are_shaped_by_the_estimator(engine_flags, flags, expected):
    """Two pieces of one rollout, another of its group, a group of one, and a reward that abstained."""
    manager = RolloutManager(parse_args([*engine_flags, "--advantage-estimator", *flags.split()]), [])
    manager._generator = "there is one"
    samples = [
        Sample(index=0, group_index=0, rollout_id=0, reward=3.0),
        Sample(index=1, group_index=0, rollout_id=0, reward=3.0),
        Sample(index=2, group_index=0, reward=1.0),
        Sample(index=3, group_index=1, reward=5.0),
        Sample(index=4, group_index=1, reward=None),
    ]
    assert manager._training_rewards(samples) == pytest.approx(expected, abs=1e-4)


def test_counts_are_checked():
    samples = [Sample(index=i, status=Sample.Status.COMPLETED) for i in range(4)]
    _check_complete(samples, 4)
    with pytest.raises(RuntimeError, match="asked for 5 rollouts, got 4"):
        _check_complete(samples, 5)
    with pytest.raises(RuntimeError, match="got 3 in 4 samples with 3 different"):
        _check_complete([*samples[:3], samples[0]], 4)
    piece = Sample(index=4, rollout_id=3, status=Sample.Status.COMPLETED)
    _check_complete([*samples, piece], 4)
    with pytest.raises(RuntimeError, match="got 4 in 5 samples with 4 different"):
        _check_complete([*samples, samples[3]], 4)
    samples[2].status = Sample.Status.ABORTED
    with pytest.raises(RuntimeError, match="1 of 4 samples are not finished: {2: 'aborted'}"):
        _check_complete(samples, 4)


def test_failed_rewards_are_bounded_over_all_groups():
    fine, bad = RewardCounts(10, 0, 0, None), RewardCounts(10, 0, 1, "sample 3: ZeroDivisionError")
    check_errors([fine, bad], 0.05)
    with pytest.raises(RuntimeError, match="failed for 1 of 20 samples.*sample 3: ZeroDivisionError"):
        check_errors([fine, bad], 0.04)
