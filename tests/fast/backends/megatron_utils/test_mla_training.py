"""Latent and sparse attention in training: recomputation, what is not trained, checkpoints, further layers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV32Config

from miles.utils.network import free_port
from tests.fast.backends.megatron_utils.families.data.deepseek_v3 import DEEPSEEK
from tests.fast.backends.megatron_utils.families.data.deepseek_v32 import SPARSE
from tests.fast.backends.megatron_utils.families.parity import micro_batches, prepare, run_config
from tests.fast.backends.megatron_utils.families.record import FamilyTests

CASES = {
    "v3": DeepseekV3Config(**DEEPSEEK, tie_word_embeddings=False),
    "v32": DeepseekV32Config(**SPARSE, index_topk=16, tie_word_embeddings=False),
}
RECOMPUTED = {
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
# Megatron compiles a function of C++ for it.
COMPILED = {
    "mla_up_proj": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "both": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "core_attn"]},
}
FURTHER = "model.layers.2.eh_proj.weight"
UNTRAINED = ("e_score_correction_bias", "indexer.")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = prepare(tmp_path_factory.mktemp("cases"), FamilyTests(CASES))
    for name in CASES:
        checkpoint = root / name / "checkpoint"
        weights = load_file(checkpoint / "model.safetensors")
        save_file(weights | {FURTHER: torch.randn(64, 128)}, checkpoint / "model.safetensors", {"format": "pt"})
        fields = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    return root


def test_training(run_ranks, root):
    run_ranks(__file__, 2, str(root), f"127.0.0.1:{free_port()}", "train")
    for name in CASES:
        before = load_file(root / name / "checkpoint" / "model.safetensors")
        after = {}
        for path in (root / name / "export").glob("*.safetensors"):
            after |= load_file(path)
        assert after.keys() == before.keys()
        same = {key for key in before if torch.equal(before[key], after[key])}
        assert same == {key for key in before if key == FURTHER or any(part in key for part in UNTRAINED)}


@pytest.mark.slow
def test_compiled_recomputation(run_ranks, root):
    run_ranks(__file__, 2, str(root), f"127.0.0.1:{free_port()}", "compiled")


def train(folder: Path, layout: str, what: str) -> None:
    """Compare recomputed gradients; take a step, save it, load it into another model and export that."""
    from miles.backends.megatron_utils.trained_model import MegatronModel
    from miles.backends.trainer import checkpoint as saving
    from miles.hf.config import load_hf_config
    from miles.utils.agreement import Agreement
    from miles.utils.checkpoint_folder import partial_folder
    from miles.weight_sync.export import save_hf
    from miles.weight_sync.source import live

    checkpoint = folder / "checkpoint"
    hf_config = load_hf_config(checkpoint)
    plain = run_config(checkpoint, layout).model_copy(
        update={"lr": 1e-2, "weight_decay": 0.5, "use_distributed_optimizer": True}
    )
    batches = micro_batches([[0, 1, 2, 3], [4, 5, 6, 7]], hf_config.vocab_size, 80)

    def loss(log_probs_N, entropy_N, packed):
        return log_probs_N.mean(), {}

    def built(changes):
        config = plain.model_copy(update=changes)
        model = MegatronModel(config, hf_config)
        model.load_hf(checkpoint)
        model.build_optimizer(config, total_steps=1)
        return model

    def gradients(model):
        model.begin_step(batches)
        model.run(batches, loss, forward_only=False)
        return {name: p.main_grad.clone() for name, p in model.chunks[0].named_parameters() if p.requires_grad}

    model = built({})
    expected = gradients(model)
    for recomputed, changes in (RECOMPUTED if what == "train" else COMPILED).items():
        found = gradients(built(changes))
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=f"{recomputed}: {name}")
    if what == "compiled":
        return
    gradients(model)
    model.apply_gradients(model.gradient_norm())
    agreement = Agreement(torch.distributed.new_group(backend="gloo"))
    saving.save(str(folder / "saved"), 0, model, True, agreement)
    other = built({})
    with torch.no_grad():
        for tensor in other.weights():
            tensor.fill_(7.0)
    saving.load(partial_folder(folder / "saved", 0), other, with_optimizer=True, with_random_state=True)
    for loaded, tensor in zip(other.weights(), model.weights(), strict=True):
        assert torch.equal(loaded, tensor)
    save_hf(folder / "export", other.weight_source(live, copies=False), torch.distributed.get_rank() == 0, agreement)


def main(rank: int, world_size: int, root: Path, master: str, what: str) -> None:
    from miles.backends.megatron_utils.initialize import initialize

    torch.set_num_threads(1)
    layout = "tp2_sp"
    initialize(run_config(root / "v3" / "checkpoint", layout), rank, world_size, master)
    for case in CASES:
        train(root / case, layout, what)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]), *sys.argv[5:])
