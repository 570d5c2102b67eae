"""Where trainer and engines sit changes nothing: `python train.py` in each placement, with real parts."""

import pytest

from miles.backends.sglang_utils.engine import SGLangEngine
from miles.engines.client import SGLangClient
from tests.fast.test_train import ALL_STAY, COLOCATED, assert_same, check_steps, steps_of, train

pytestmark = pytest.mark.real

__all__ = ["train"]  # a fixture

ONE_RANK = ("--actor-num-gpus-per-node", "1")
PLACEMENTS = {
    "colocated": (*COLOCATED, *ALL_STAY),
    # One engine takes turns with the trainer and reads its memory, the other has its bundle alone and is sent weights.
    "both together": (*COLOCATED, "--rollout-num-gpus", "2", "--sglang-router-policy", "round_robin"),
    "split": (*ONE_RANK, "--rollout-num-gpus", "2"),
    "external": (*ONE_RANK, "--update-weight-transfer-mode", "disk"),
}


@pytest.mark.slow
@pytest.mark.timeout(2000)
async def test_every_placement_learns_the_same(train, tmp_path, engine_config):  # noqa: F811
    engine = SGLangEngine(engine_config.model_copy(update={"run_dir": str(tmp_path)}), 7, [])
    url = engine.start()
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    there = ("--rollout-external-engine-addrs", url.removeprefix("http://"), "--update-weight-disk-dir", str(exchange))
    try:
        for name, flags in PLACEMENTS.items():
            run = train(name, *flags, *(there if name == "external" else ()), "--no-use-tensorboard", rollouts=2)
            assert run.wait() == 0, f"{name}: {run.output[-3000:]}"
            assert run.left() == []
            steps = steps_of(tmp_path / name)
            check_steps(steps, 2)
            if name != "colocated":
                assert_same(steps, steps_of(tmp_path / "colocated"))
            if name == "both together":
                # Of the two engines, one lets go of its memory.
                assert run.output.count("engine kv_cache leaves") == 1
                sizes = {step["perf/offload_rollout_bytes"] for step in steps}
                assert len(sizes) == 1 and 0.01e9 < sizes.pop() < 0.02e9
        assert list(exchange.iterdir()) == []
        async with SGLangClient(url) as client:
            # The first sync and one after each rollout; the engine outlives the run.
            assert (await client.model_info())["weight_version"] == "3"
    finally:
        engine.shutdown()
