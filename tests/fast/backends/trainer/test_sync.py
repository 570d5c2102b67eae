"""The second trainer's weights reach a real engine, from a trainer that is awake and from one that sleeps."""

import asyncio
import importlib.util
from pathlib import Path

import pytest
import torch

from miles.engines.client import SGLangClient
from miles.utils.network import free_port
from miles.weight_sync.target import EngineTarget
from tests.fast.backends.trainer.plain import PlainTrainRayActor
from tests.fast.weight_sync.test_real_engine import check_log_probs

ROOT = Path(__file__).parents[4]


@pytest.fixture
def server(engine_server):
    """The shared server, which says again afterwards that its weights are of the version that it started with."""

    async def version(text=None):
        async with SGLangClient(engine_server) as client:
            if text is not None:
                await client.update_weight_version(text)
            return (await client.model_info())["weight_version"]

    before = asyncio.run(version())
    yield engine_server
    asyncio.run(version(before))


@pytest.fixture
def build(tmp_path, tiny_checkpoint):
    """An actor, built and loaded, and its shard of the made-up rollout; its world ends with the test."""
    spec = importlib.util.spec_from_file_location("loss_trace", ROOT / "scripts" / "loss_trace.py")
    tracing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tracing)
    flags = ["--lr", "0.01", "--save-hf", str(tmp_path / "export")]
    config = tracing.trace_config(str(tiny_checkpoint), 1, 2, flags, tmp_path, sleep=True)
    actor = PlainTrainRayActor(config, 0, 1)
    actor.init(f"127.0.0.1:{free_port()}")
    yield actor, tracing.made_up_shard(config, actor.model.hf_config.vocab_size, 0)
    torch.distributed.destroy_process_group()


def test_an_engine_holds_what_was_trained(server, build, tiny_checkpoint, tmp_path):
    actor, shard = build
    first = [parameter.detach().clone() for parameter in actor.model.model.parameters()]
    actor.train(0, shard)
    actor.connect([EngineTarget(server, 1, [0])])
    actor.sleep()
    assert actor.update_weights(1)["perf/update_weights_tensors"] == len(first)
    assert actor.residency.asleep
    actor.export_hf(0)
    check_log_probs(server, tmp_path / "export", "1")
    # The engine's own weights again, from a trainer that is awake.
    actor.wake_up()
    with torch.no_grad():
        for parameter, value in zip(actor.model.model.parameters(), first, strict=True):
            assert not torch.equal(parameter, value)
            parameter.copy_(value)
    actor.update_weights(2)
    check_log_probs(server, tiny_checkpoint, "2")
    actor.disconnect()
