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
from miles.engines.client import SGLangClient, SGLangError
from miles.ray import placement_group as placing
from miles.ray.rollout.engine_memory import EngineMemory, RolloutMemory
from miles.ray.rollout.rollout_manager import RolloutManager
from miles.ray.rollout.rollout_state import read_state, write_state
from miles.residency.plan import Move, Party, Place, Region
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.collector import Collected
from miles.rollout.engine_pool import EnginePool
from miles.rollout.hooks import Hooks
from miles.rollout.sample_io import save_samples
from miles.utils.arguments import parse_args
from miles.utils.types import Sample
from tests.fast.ray.rollout.test_training_data import groups_of

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
        await manager.save(tmp_path, 0, 3)
        second = await manager.generate(1)
        resumed = RolloutManager(parse_args(flags), [])
        assert await resumed.load(tmp_path) == 3
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


async def test_a_save_keeps_what_was_there_before_a_rollout_that_was_begun_ahead(engine_flags, local_ray, tmp_path):
    config = parse_args([*engine_flags, "--loss-type", "sft_loss"]).model_copy(update={"one_step_ahead": True})
    folders = [tmp_path / name for name in ("with the next begun", "without")]
    ahead, in_turns = RolloutManager(config, []), RolloutManager(config, [])
    for manager in (ahead, in_turns):
        await manager.generate(0)
    await ahead.generate(1)
    for manager, folder in zip((ahead, in_turns), folders, strict=True):
        folder.mkdir()
        await manager.save(folder, 0, 1)
    assert read_state(folders[0]) == read_state(folders[1])
    assert read_state(folders[0])[0]["data"]["group_index"] == 4
    # Nothing has been begun after the last one.
    await ahead.save(folders[0], 1, 2)
    state, version = read_state(folders[0])
    assert state["data"]["group_index"] == 8 and version == 2


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path):
    for collector in (
        None,
        {},
        {"finished": []},
        {"finished": [[{"a": [1]}, {}], []], "unfinished": [[{"b": "\u00e9"}]]},
    ):
        state = {"data": {"epoch": 1, "files": [{"path": "a"}]}, "collector": collector}
        write_state(tmp_path, state, 3)
        assert read_state(tmp_path) == (state, 3)
    with pytest.raises(ValueError, match="samples.json can't be written as JSON .*set is not JSON serializable"):
        write_state(tmp_path, {"data": {}, "collector": {"finished": [{1}]}}, 3)
    (tmp_path / "samples.json").write_text('{"weight_version": 3, "coll')
    with pytest.raises(ValueError, match="samples.json can't be read .*the checkpoint is not whole"):
        read_state(tmp_path)
    (tmp_path / "samples.json").unlink()
    with pytest.raises(ValueError, match="samples.json can't be read .*No such file"):
        read_state(tmp_path)


async def test_a_rollout_from_a_file_is_trained_on_as_it_is(engine_flags, local_ray, tmp_path):
    path = str(tmp_path / "{rollout_id}.jsonl")
    for rollout_id, groups in enumerate((4, 3)):
        save_samples(path, rollout_id, groups_of(*[[1.0, 0.0, 1.0, 0.0]] * groups))
    manager = RolloutManager(parse_args([*engine_flags, "--load-debug-rollout-data", path]), [])
    await manager.start()
    result = await manager.generate(0)
    (shard,) = ray.get(result.shards)
    assert shard.batch["rewards"][:2] == pytest.approx([0.866, -0.866], abs=1e-3)
    assert result.metrics["rollout/raw_reward"] == 0.5 and "perf/tokens_per_gpu_per_sec" not in result.metrics
    with pytest.raises(ValueError, match="rollout 1 has 12 samples in 3 groups, and --rollout-batch-size 4 with"):
        await manager.generate(1)


class Background:
    """A collector and its pool that write their calls down."""

    def __init__(self, groups):
        self.groups, self.calls = groups, []

    def start(self):
        self.calls.append("start")

    async def take(self, rollout_id, version):
        self.calls.append(f"take {rollout_id}")
        return Collected(self.groups, self.groups, {})

    async def stop(self):
        self.calls.append("stop")

    async def hold(self):
        self.calls.append("hold")

    def release(self):
        self.calls.append("release")

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")


async def test_what_runs_in_the_background_starts_late_pauses_for_evaluations_and_ends(engine_flags, local_ray):
    config = parse_args(engine_flags).model_copy(update={"fully_async": True})
    manager = RolloutManager(config, [])
    manager._collector = manager._pool = background = Background(groups_of(*[[1.0, 0.0, 1.0, 0.0]] * 4))

    class Evaluator:
        async def run(self, rollout_id, runner_for):
            background.calls.append(f"evaluate {rollout_id}")
            if rollout_id == 1:
                raise RuntimeError("no engine is left")
            return RolloutFnEvalOutput({}, {"eval/a": 1.0})

    manager._evaluator = Evaluator()
    # Nothing is generated with the weights of before the first sync.
    await manager.hold()
    await manager.release()
    assert await manager.evaluate(0, True) == {"eval/a": 1.0}
    for rollout_id in range(2):
        await manager.generate(rollout_id)
    assert background.calls == ["hold", "release", "evaluate 0", "start", "take 0", "take 1"]
    background.calls.clear()
    with pytest.raises(RuntimeError, match="no engine is left"):
        await manager.evaluate(1, False)
    await manager.dispose()
    await manager.dispose()
    assert background.calls == ["pause", "evaluate 1", "resume", "stop"]


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


class OneRequest:
    """A client whose request ends when it is aborted."""

    url = "http://engine"

    def __init__(self):
        self.sent, self.aborted = 0, asyncio.Event()

    async def generate(self, input_ids, sampling_params):
        self.sent += 1
        await self.aborted.wait()
        raise SGLangError(self.url, None, "aborted", 1)

    async def abort(self):
        self.aborted.set()


class Released(EngineMemory):
    """The memory of that engine, which must run nothing when it is released."""

    async def missing(self):
        return []

    async def move(self, moves):
        assert self._client.sent == 0 or self._client.aborted.is_set()
        return 0


async def test_what_a_function_of_the_users_left_running_never_meets_the_release(engine_flags, monkeypatch, caplog):
    monkeypatch.setattr("miles.ray.rollout.rollout_manager.EngineMemory.move", Released.move)
    manager = RolloutManager(parse_args(engine_flags), [])
    client = OneRequest()
    manager._hooks = Hooks(rollout=lambda *_: None)

    async def all_live():
        return {}

    pool = manager._pool = EnginePool(manager._config, [client], 4, manager._tokenizer, all_live)
    engines = [Released("engine 0", client)]
    manager._memory = RolloutMemory(engines, all_live, manager._cut_off_what_is_left)
    sample, parameters = Sample(index=0, group_index=0, tokens=[97]), {"max_new_tokens": 4}
    left = asyncio.create_task(pool.complete([sample], [parameters]))
    await asyncio.sleep(0)
    await manager.move([Move(Party.ENGINE, Region.KV_CACHE, Place.GPU, Place.DROPPED)])
    assert left.done() and sample.status is Sample.Status.ABORTED and client.sent == 1
    assert "1 samples are still in flight, though the rollout is over: what --rollout-function-path" in caplog.text
    # What it begins afterwards reaches no engine, until the next rollout.
    await pool.complete([sample], [parameters])
    assert client.sent == 1 and sample.status is Sample.Status.ABORTED
    async with manager._memory.in_use("rollout 1"):
        manager._let_in()
        await asyncio.wait_for(pool.wait_released(), 5)
