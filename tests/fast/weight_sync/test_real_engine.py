"""All weights of a perturbed model into a real SGLang server, then its log-probabilities against transformers'."""

import asyncio
import os
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from miles.backends.megatron_utils.hf import family_for, load_hf_config
from miles.backends.megatron_utils.hf.checkpoint_io import load_into
from miles.backends.sglang_utils.client import SGLangClient
from miles.backends.sglang_utils.engine import SGLangEngine
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.weight_sync.gather import ParallelInfo, live
from miles.weight_sync.updater import EngineTarget, WeightUpdater
from tests.fast.weight_sync.conftest import StageModel, no_group


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


def updater_of(weights_folder, checkpoint, url, group):
    config = load_hf_config(checkpoint)
    family, layers = family_for(config), range(config.num_hidden_layers)
    model = StageModel(config, layers)
    load_into(model, family, config, weights_folder, layers, 0, 1, True, True)
    parallel = ParallelInfo(0, 1, no_group, 0, 1, no_group, [layers])
    engines = [EngineTarget(url, 1, [0])]
    minute = timedelta(minutes=1)
    return WeightUpdater(model, family, config, parallel, checkpoint, engines, 0, group, 100_000, True, minute)


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


def test_an_update_reaches_every_weight_and_leaves_nothing_behind(engine_server, tiny_checkpoint, group):
    async def version():
        async with SGLangClient(engine_server) as client:
            return (await client.model_info())["weight_version"]

    async def set_version(text):
        async with SGLangClient(engine_server) as client:
            await client.update_weight_version(text)

    before = asyncio.run(version())
    other = perturbed(tiny_checkpoint, 1)
    updater = updater_of(other, tiny_checkpoint, engine_server, group)
    metrics = updater.update(1, live)
    assert metrics["perf/update_weights_tensors"] == 2 * 11 + 2
    check_log_probs(engine_server, other, "1")

    updater.update(2, live)
    shared_before, files_before = open_things()
    for number in range(3, 23):
        updater.update(number, live)
    shared_after, files_after = open_things()
    # A connection more or less may be closing; a leak would be one a bucket.
    assert shared_before == shared_after and files_after <= files_before + 5
    check_log_probs(engine_server, other, "22")

    updater_of(tiny_checkpoint, tiny_checkpoint, engine_server, group).update(23, live)
    check_log_probs(engine_server, tiny_checkpoint, "23")
    asyncio.run(set_version(before))


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
        updater_of(other := perturbed(folder, 2), folder, url, group).update(1, live)
        check_log_probs(url, other, "1")
    finally:
        engine.shutdown()
