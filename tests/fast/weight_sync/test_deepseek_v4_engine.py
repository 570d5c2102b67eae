"""All weights of a DeepSeek-V4 into a real SGLang server. It computes on GPUs alone: checksums say what has arrived."""

import asyncio
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.hf_weights import load_into
from miles.backends.megatron_utils.weight_source import MegatronWeights
from miles.backends.sglang_utils.engine import SGLangEngine
from miles.engines.client import SGLangClient
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.utils.agreement import Agreement
from miles.weight_sync.updater import WeightUpdater
from tests.fast.weight_sync.conftest import StageModel, alone, sync_settings
from tests.fast.weight_sync.test_real_engine import TrainerRank, group, local, timedelta  # noqa: F401

pytestmark = [pytest.mark.real, pytest.mark.slow]

# The smallest that SGLang's kernels take.
SIZES = dict(hidden_size=512, intermediate_size=256, num_heads=64, num_kv_heads=1, head_dim=512, vocab_size=1024)


def updater_of(weights_folder, checkpoint, url, group, **changes):  # noqa: F811
    config = load_hf_config(checkpoint)
    family, layers = family_for(config), config.num_hidden_layers
    model = StageModel(config, range(layers))
    for name, parameter in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last == "expert_of_token":
            del module.expert_of_token
            module.register_buffer(last, torch.zeros(parameter.shape, dtype=torch.int64))
        elif ".experts." in name:
            # All experts of a layer are one parameter.
            stacked = torch.zeros(config.n_routed_experts, *parameter.shape)
            module.register_parameter(last, torch.nn.Parameter(stacked))
    load_into([model], family, config, weights_folder, alone(layers))
    source = MegatronWeights([model], family, config, alone(layers), CheckpointIndex(checkpoint))
    trainer = TrainerRank(0, Agreement(group), "127.0.0.1", timedelta(minutes=1))
    return WeightUpdater(source, local(url), trainer, sync_settings(checkpoint, **changes))


async def checksums(url):
    async with SGLangClient(url) as client:
        (ranks,) = await client.weight_checksums()
        return ranks


def test_every_weight_arrives(engine_config, group, tmp_path, caplog):  # noqa: F811
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, folder in enumerate((first, second)):
        make_tiny_checkpoint(folder, "deepseek_v4", **SIZES, tie=False, dtype="bfloat16", seed=seed)
    weights = load_file(second / "model.safetensors")
    noisy = {
        name: tensor + torch.rand_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    save_file(noisy, second / "model.safetensors", {"format": "pt"})
    config = engine_config.model_copy(
        update={"hf_checkpoint": str(first), "run_dir": str(tmp_path / "run"), "bf16": True}
    )
    engine = SGLangEngine(config, 0, [])
    try:
        url = engine.start()
        at_start = asyncio.run(checksums(url))
        updater_of(second, first, url, group).update(1)
        after = asyncio.run(checksums(url))
        assert not [name for name in at_start if at_start[name] == after[name]]
        with caplog.at_level(logging.INFO):
            updater_of(first, first, url, group, check_equal=True).update(2)
        assert "are overwritten by an update" in caplog.text
        assert asyncio.run(checksums(url)) == at_start
    finally:
        engine.shutdown()
