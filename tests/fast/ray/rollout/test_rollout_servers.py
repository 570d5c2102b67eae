"""The rollout manager with real servers: engines of its own and of others, a router, a teacher."""

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from miles.backends.sglang_utils.engine import SGLangEngine
from miles.backends.sglang_utils.supervisor import group_members
from miles.engines.client import SGLangClient
from miles.ray import placement_group as placing
from miles.ray.rollout.rollout_manager import RolloutManager
from miles.utils.arguments import parse_args

ALL_STAY = ("--no-offload-train", "--no-offload-rollout")


def servers_of(folder):
    """Ids of the processes that were started with a path in `folder`: servers, not their workers (they have titles)."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "sglang" in (line := " ".join(process.info["cmdline"] or ())) and str(folder) in line:
            found.append(process.pid)
    return found


class StartsLater(SGLangEngine):
    """An engine whose server starts once the file `go` is in the run's folder."""

    def start(self):
        while not (Path(self._config.run_dir) / "go").exists():
            time.sleep(0.05)
        return super().start()


def test_a_failed_start_ends_the_other_engines_too(engine_config, local_ray, tiny_checkpoint, tmp_path):
    good = tmp_path / "good"
    good.symlink_to(tiny_checkpoint)
    configs = [
        engine_config.model_copy(update={"hf_checkpoint": str(tmp_path / name), "run_dir": str(tmp_path)})
        for name in ("good", "nothing")
    ]
    engines = [
        ray.remote(kind).options(num_cpus=0).remote(config, i, [])
        for i, (kind, config) in enumerate(zip((SGLangEngine, StartsLater), configs, strict=True))
    ]
    manager = RolloutManager(engine_config, engines)
    groups = set()

    async def start():
        starting = asyncio.create_task(manager.start())
        while not starting.done():
            for pid in servers_of(tmp_path):
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    groups.add(os.getpgid(pid))
            if groups:
                (tmp_path / "go").touch()
            await asyncio.sleep(0.1)
        await starting

    with pytest.raises(Exception, match="exited with code 1(.|\n)*engine_1.log"):
        asyncio.run(start())
    assert len(groups) == 2
    deadline = time.monotonic() + 30
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

    metrics = ray.get(manager.evaluate.remote(0, False))
    assert 0 <= metrics["eval/held-out"] <= 1 and metrics["eval/held-out/response_len/max"] <= 8
    ray.get(manager.save.remote(tmp_path, 0, 1))
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
    with pytest.raises(Exception, match=rf"engine 0 \({url}\): the server \(pid (.|\n)*Last lines of .*engine_0.log"):
        ray.get(manager.check_engines.remote())
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
