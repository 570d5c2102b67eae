"""The rollout manager without servers: what it makes of prompts, files and functions of the user's."""

import asyncio

import numpy as np
import pytest
import ray

from miles.engines.client import SGLangError
from miles.ray.rollout.engine_memory import EngineMemory, RolloutMemory
from miles.ray.rollout.rollout_manager import RolloutManager
from miles.ray.rollout.rollout_state import read_state, write_state
from miles.residency.plan import Move, Party, Place, Region
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.collector import Collected
from miles.rollout.engine_pool import EnginePool
from miles.rollout.sample_io import save_samples
from miles.utils.arguments import parse_args
from miles.utils.types import Sample
from tests.fast.ray.rollout.test_training_data import groups_of


def test_bad_prompts_are_refused_on_construction(engine_flags, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "a", "label": "1"}\n{"input": "b"}\n')
    flags = [str(path) if flag.endswith("prompts.jsonl") else flag for flag in engine_flags]
    with pytest.raises(ValueError, match="bad.jsonl:2"):
        RolloutManager(parse_args(flags), [])
    good = parse_args([*engine_flags, "--eval-interval", "1", "--eval-prompt-data", "held-out", str(path)])
    with pytest.raises(ValueError, match="bad.jsonl:2"):
        RolloutManager(good, [])


def seen(config, groups, data_source):
    """An all-samples function."""
    SEEN.append([sample.reward for group in groups for sample in group])


SEEN = []


def test_supervised_rollouts_need_no_engine(engine_flags, local_ray, tmp_path):
    flags = [*engine_flags, "--loss-type", "sft_loss", "--global-batch-size", "8"]
    flags += ["--rollout-all-samples-process-path", f"{__name__}.seen"]
    manager = RolloutManager(parse_args(flags), [])
    SEEN.clear()

    async def go():
        await manager.start()
        first = await manager.generate(0)
        assert SEEN == [[0.0] * 16]
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
        self.shared = {}

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
    manager._config = manager._config.model_copy(update={"rollout_function_path": "my.rollout"})

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
