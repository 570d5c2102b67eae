"""All weights of a perturbed model into real SGLang servers, then their log-probabilities against transformers'."""

import asyncio
import json
import logging
import os
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.hf_weights import load_into
from miles.backends.megatron_utils.weight_source import MegatronWeights
from miles.backends.sglang_utils.engine import SGLangEngine
from miles.engines.client import SGLangClient, SGLangError
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.hf.fp8 import fp8_weights
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.utils.agreement import Agreement
from miles.weight_sync import check, session
from miles.weight_sync.format import Fp8Format
from miles.weight_sync.source import live
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.updater import TrainerRank, WeightUpdater
from tests.fast.quantised import fp8_blocks, is_fp8, write_fp8
from tests.fast.weight_sync.conftest import StageModel, alone, sync_settings

pytestmark = pytest.mark.real

TENSORS = 2 * 11 + 2


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def perturbed(folder, seed):
    """The checkpoint with noise on every weight, saved beside it; a tied head stays tied."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder.with_name(folder.name + f"-{seed}"))
    return folder.with_name(folder.name + f"-{seed}")


def updater_of(weights_folder, checkpoint, engines, group, engine_format=None, **changes):
    config = load_hf_config(checkpoint)
    family, layers = family_for(config), config.num_hidden_layers
    model = StageModel(config, range(layers))
    load_into([model], family, config, weights_folder, alone(layers))
    source = MegatronWeights([model], family, config, alone(layers), CheckpointIndex(checkpoint))
    trainer = TrainerRank(0, Agreement(group), "127.0.0.1", timedelta(minutes=1))
    return WeightUpdater(source, engines, trainer, sync_settings(checkpoint, **changes), engine_format)


def local(url):
    return [EngineTarget(url, 1, [0])]


def remote(url):
    return [EngineTarget(url, 1, None)]


async def generate(url):
    prompts = [list(b"12+34="), list(b"a"), list(b"the quick brown fox")]
    async with SGLangClient(url) as client:
        answers = await client.generate(prompts, [{"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}] * 3)
        return prompts, answers


def check_log_probs(url, weights_folder, version):
    model = AutoModelForCausalLM.from_pretrained(weights_folder)
    prompts, answers = asyncio.run(generate(url))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["meta_info"]["weight_version"] == version
        ids = torch.tensor(prompt + answer["output_ids"])
        with torch.no_grad():
            log_p_TV = torch.log_softmax(model(ids[None]).logits[0], -1)
        expected = log_p_TV[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
        got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def open_things():
    """This process's shared-memory files, and the open files of it and of all it started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    shared = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    return len(shared), sum(process.num_fds() for process in processes)


@pytest.fixture
def server(engine_server, tiny_checkpoint, group):
    """The shared server, which has its own weights and version again afterwards."""

    async def version(text=None):
        async with SGLangClient(engine_server) as client:
            if text is not None:
                await client.update_weight_version(text)
            return (await client.model_info())["weight_version"]

    before = asyncio.run(version())
    yield engine_server
    updater_of(tiny_checkpoint, tiny_checkpoint, local(engine_server), group).update(99)
    check_log_probs(engine_server, tiny_checkpoint, "99")
    asyncio.run(version(before))


def test_an_update_reaches_every_weight_and_leaves_nothing_behind(server, tiny_checkpoint, group):
    other = perturbed(tiny_checkpoint, 1)
    updater = updater_of(other, tiny_checkpoint, local(server), group)
    metrics = updater.update(1)
    assert metrics["perf/update_weights_tensors"] == TENSORS
    check_log_probs(server, other, "1")

    updater.update(2)
    shared_before, files_before = open_things()
    for number in range(3, 23):
        updater.update(number)
    shared_after, files_after = open_things()
    # A connection more or less may be closing; a leak would be one a bucket.
    assert shared_before == shared_after and files_after <= files_before + 5
    check_log_probs(server, other, "22")


@pytest.mark.parametrize("mode", ["broadcast", "disk"])
def test_a_remote_engine(server, tiny_checkpoint, group, tmp_path, mode):
    other = perturbed(tiny_checkpoint, 3)
    changes = dict(transfer_mode=mode, disk_folder=str(tmp_path) if mode == "disk" else None)
    updater = updater_of(other, tiny_checkpoint, remote(server), group, **changes)
    updater.update(1)
    check_log_probs(server, other, "1")
    updater.source.read = lambda parameter, expert=None: live(parameter, expert) * 0
    updater.update(2)
    updater.source.read = live
    updater.update(3)
    check_log_probs(server, other, "3")
    assert list(tmp_path.iterdir()) == []
    name = updater.transports[0]._name if mode == "broadcast" else "none"
    updater.close()
    with pytest.raises(SGLangError, match="400"):  # it knows no such group any more
        asyncio.run(leave_group(server, name))
    updater.update(4)  # with a new group
    updater.close()


async def leave_group(url, name):
    async with SGLangClient(url) as client:
        await client.destroy_weights_update_group(name)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_request_that_runs_meanwhile(server, tiny_checkpoint, group, mode, caplog, monkeypatch):
    """It is ended, or goes on, and then the cache keeps old prefixes until an update finds the engine idle."""
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0.0)
    other = perturbed(tiny_checkpoint, 4)
    updater = updater_of(other, tiny_checkpoint, local(server), group, pause_mode=mode)
    length = 250

    async def straddle():
        async with SGLangClient(server) as client:
            sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
            running = asyncio.create_task(client.generate([list(b"straddles")], [sampling]))
            while not await client.running_requests():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(updater.update, 1)
            (answer,) = await running
            return answer

    with caplog.at_level(logging.WARNING):
        answer = asyncio.run(straddle())
    reason = answer["meta_info"]["finish_reason"]["type"]
    assert reason == ("abort" if mode == "abort" else "length")
    assert mode == "abort" or len(answer["output_ids"]) == length
    assert ("goes on with 1 requests after the update" in caplog.text) == (mode != "abort")
    if mode != "abort":
        updater.update(2)
    check_log_probs(server, other, "1" if mode == "abort" else "2")


def test_the_check_finds_a_tensor_that_an_update_does_not_write(server, tiny_checkpoint, group, caplog, monkeypatch):
    updater = updater_of(tiny_checkpoint, tiny_checkpoint, local(server), group, check_equal=True)
    with caplog.at_level(logging.INFO):
        updater.update(1)
    # Of a layer's tensors q, k and v are one in the engine, and so are gate and up.
    assert f"all {2 * 8 + 2} tensors of {server} are overwritten" in caplog.text
    assert "13 of them were compared with what was sent and are bit-equal" in caplog.text

    updater = updater_of(tiny_checkpoint, tiny_checkpoint, local(server), group, check_equal=True)
    monkeypatch.setattr(check, "tensor_hash", lambda tensor: "0")
    with pytest.raises(
        RuntimeError, match=f"tensors of {server} are not what was sent: model.layers.0.input_layernorm.weight"
    ):
        updater.update(2)


def test_an_engine_of_a_quantised_checkpoint_has_plain_weights(tmp_path, tiny_checkpoint, engine_config, group):
    """It starts without weights, and the first update fills all of them."""
    quantised, plain = tmp_path / "fp8", tmp_path / "bf16"
    write_fp8(tiny_checkpoint, quantised, plain, power_of_two=True)
    fields = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(fields | {"dtype": "float32"}))  # what transformers computes in
    config = engine_config.model_copy(update={"hf_checkpoint": str(quantised), "run_dir": str(tmp_path / "run")})
    engine = SGLangEngine(config, 0, [])
    try:
        url = engine.start()
        updater_of(quantised, quantised, local(url), group, check_equal=True).update(1)
        check_log_probs(url, plain, "1")
    finally:
        engine.shutdown()


def after_fp8(folder):
    """The checkpoint with what its projections are once they were quantised, beside it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_fp8(name):
                parameter.copy_(fp8_blocks(parameter)[2])
    model.save_pretrained(folder.with_name(folder.name + "-fp8"))
    return folder.with_name(folder.name + "-fp8")


def test_an_fp8_engine_computes_with_what_was_quantised_on_its_way(tmp_path, engine_config, group):
    """It starts from a bf16 checkpoint; the bytes that it holds are those that were sent."""
    folder = tmp_path / "model"
    sizes = dict(hidden_size=256, num_layers=2, head_dim=64, intermediate_size=512)
    make_tiny_checkpoint(folder, init_std=0.1, tie=False, **sizes)
    changes = {"hf_checkpoint": str(folder), "run_dir": str(tmp_path / "run"), "rollout_fp8": True}
    engine = SGLangEngine(engine_config.model_copy(update=changes), 0, [])
    engine_format = Fp8Format(fp8_weights(CheckpointIndex(folder)))
    try:
        url = engine.start()
        for version, way in enumerate((local, remote), 1):
            other = perturbed(folder, version)
            updater = updater_of(other, folder, way(url), group, engine_format, check_equal=version == 1)
            metrics = updater.update(version)
            updater.close()
            assert metrics["perf/update_weights_tensors"] == TENSORS + 1 + 2 * 7
            check_log_probs(url, after_fp8(other), str(version))
            with pytest.raises(AssertionError):
                check_log_probs(url, other, str(version))
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_an_engine_of_two_ranks_beside_a_colocated_one(server, tiny_checkpoint, group, engine_config, tmp_path, caplog):
    """Over shared memory, then remote in one update with the other, each compared tensor by tensor."""
    changes = {"rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 2, "run_dir": str(tmp_path)}
    engine = SGLangEngine(engine_config.model_copy(update=changes), 1, [])
    try:
        url = engine.start()
        for version, sources in enumerate(([0, 0], None), 1):
            other = perturbed(tiny_checkpoint, 5 + version)
            engines = [EngineTarget(url, 2, sources), *local(server)]
            with caplog.at_level(logging.INFO):
                updater_of(other, tiny_checkpoint, engines, group, check_equal=True).update(version)
            assert f"all {2 * (2 * 8 + 2)} tensors of {url} are overwritten" in caplog.text
            for each in (url, server):
                check_log_probs(each, other, str(version))
            caplog.clear()
    finally:
        engine.shutdown()


@pytest.mark.slow  # test_sglang_loaders.py shows every family's names to SGLang's loaders
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families(family, tmp_path, engine_config, group):
    folder = tmp_path / family
    make_tiny_checkpoint(
        folder,
        family=family,
        hidden_size=64,
        num_layers=2,
        head_dim=16,
        intermediate_size=128,
        tie=False,
        init_std=0.1,
    )
    config = engine_config.model_copy(update={"hf_checkpoint": str(folder), "run_dir": str(tmp_path / "run")})
    engine = SGLangEngine(config, 0, [])
    try:
        url = engine.start()
        updater_of(other := perturbed(folder, 2), folder, local(url), group).update(1)
        check_log_probs(url, other, "1")
    finally:
        engine.shutdown()
