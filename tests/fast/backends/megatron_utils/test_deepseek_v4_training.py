"""A DeepSeek-V4 in training: what is not trained, resuming in other layouts, its export; in bf16 too."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.hf.deepseek_v4_hub import draw_experts
from miles.hf.families.deepseek_v4 import repackaged_name
from miles.utils.network import free_ports
from tests.fast.backends.megatron_utils.families.data.deepseek_v4 import CASES, save
from tests.fast.backends.megatron_utils.families.parity import LAYOUTS, micro_batches, prepare, run_config
from tests.fast.backends.megatron_utils.families.record import FamilyTests
from tests.fast.ranks import leave_world

pytestmark = [pytest.mark.real, pytest.mark.slow]

CASE, SAVED_IN = "pro", "tp2_sp"
RESUMED_IN = ("tp2_sp", "pp2_interleaved", "one")
REPACKAGED = "repackaged"
FURTHER = "mtp.0.e_proj.weight"
UNTRAINED = (FURTHER, "gate.bias", "tid2eid", "indexer.")


@pytest.fixture(scope="module")
def folder(start_ranks, tmp_path_factory):
    """With a folder of weights after one step and after two, straight on and for each layout that goes on."""
    family = FamilyTests({CASE: CASES[CASE]}, fill=draw_experts, save=save)
    folder = prepare(tmp_path_factory.mktemp("cases"), family) / CASE
    weights = load_file(folder / "checkpoint" / "model.safetensors")
    save_file(weights | {FURTHER: torch.randn(64, 64)}, folder / "checkpoint" / "model.safetensors", {"format": "pt"})
    repackaged = folder / REPACKAGED / "checkpoint"
    shutil.copytree(folder / "checkpoint", repackaged)
    save_file({repackaged_name(name): tensor for name, tensor in weights.items()}, repackaged / "model.safetensors")
    ports = free_ports(3 + len(RESUMED_IN))
    start_ranks(tmp_path_factory.mktemp("ranks"), __file__, 2, str(folder), json.dumps(ports), timeout=500)
    return folder


def exported(folder: Path, name: str) -> dict[str, torch.Tensor]:
    weights = {}
    for path in (folder / name).glob("*.safetensors"):
        weights |= load_file(path)
    return weights


@pytest.mark.parametrize("name", ["straight 1", "bf16 1"])
def test_what_is_trained(folder, name):
    before, after = load_file(folder / "checkpoint" / "model.safetensors"), exported(folder, name)
    assert after.keys() == before.keys()
    same = {weight for weight, tensor in before.items() if torch.equal(tensor.to(after[weight].dtype), after[weight])}
    assert same == {weight for weight in before if any(part in weight for part in UNTRAINED)}


def test_an_export_is_as_published(folder):
    before, after = json.loads((folder / "checkpoint" / "config.json").read_text()), folder / "straight 1"
    written = json.loads((after / "config.json").read_text())
    assert {name: value for name, value in written.items() if name not in ("dtype", "torch_dtype")} == {
        name: value for name, value in before.items() if name not in ("dtype", "torch_dtype")
    }
    dtypes = {name: tensor.dtype for name, tensor in exported(folder, "bf16 1").items()}
    assert dtypes["embed.weight"] == dtypes["layers.1.attn.wq_a.weight"] == torch.bfloat16
    wide = ("layers.0.hc_attn_fn", "layers.0.attn.attn_sink", "layers.1.attn.compressor.ape", "layers.2.ffn.gate.bias")
    assert {dtypes[name] for name in wide} == {torch.float32}
    assert dtypes["layers.0.ffn.gate.tid2eid"] == torch.int64


def test_names_of_the_repackaging_go_out_as_they_came(folder):
    before, after = load_file(folder / "checkpoint" / "model.safetensors"), exported(folder / REPACKAGED, "again")
    before.pop(FURTHER)
    assert after.keys() == {repackaged_name(name) for name in before}
    assert all(torch.equal(after[repackaged_name(name)], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("layout", RESUMED_IN)
def test_resuming(folder, layout):
    saved, loaded = exported(folder, "straight 1"), exported(folder, f"{layout} 1")
    assert loaded.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
    expected, found = exported(folder, "straight 2"), exported(folder, f"{layout} 2")
    assert any(not torch.equal(expected[name], saved[name]) for name in saved)
    if layout == SAVED_IN:
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    for name, tensor in expected.items():
        # Adam's step of a gradient that cancels is one of its rounding.
        if not any(part in name for part in ("hc_", "mtp")):
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=f"{layout}: {name}")


# --- on a rank ---


class Run:
    """A model in a layout, with its optimizer."""

    def __init__(self, folder: Path, layout: str, **changes):
        from miles.backends.megatron_utils.trained_model import MegatronModel
        from miles.hf.config import load_hf_config
        from miles.utils.agreement import Agreement

        checkpoint = folder / "checkpoint"
        self.folder, hf_config = folder, load_hf_config(checkpoint)
        # A step of Adam that rounding does not turn round.
        given = {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.5, "use_distributed_optimizer": True}
        config = run_config(checkpoint, layout).model_copy(update=given | changes)
        self.model = MegatronModel(config, hf_config)
        self.model.load_hf(checkpoint)
        self.model.build_optimizer(config, total_steps=2)
        self.batches = micro_batches([[0, 1, 2, 3], [4, 5, 6, 7]], hf_config.vocab_size, 80)
        self.agreement = Agreement(torch.distributed.new_group(backend="gloo"))

    def step(self, name: str) -> None:
        """Take a step, and export."""

        def loss(log_probs_N, entropy_N, packed):
            return log_probs_N.mean(), {}

        self.model.begin_step(self.batches)
        self.model.run(self.batches, loss, forward_only=False)
        self.model.apply_gradients(self.model.gradient_norm())
        self.export(name)

    def export(self, name: str) -> None:
        from miles.weight_sync.export import save_hf
        from miles.weight_sync.source import live

        first = torch.distributed.get_rank() == 0
        save_hf(self.folder / name, self.model.weight_source(live, copies=False), first, self.agreement)

    def save(self) -> None:
        from miles.backends.trainer import checkpoint

        checkpoint.save(str(self.folder / "saved"), 0, self.model, True, self.agreement)

    def load(self) -> None:
        from miles.backends.trainer import checkpoint
        from miles.utils.checkpoint_folder import partial_folder

        with torch.no_grad():
            for tensor in self.model.weights():
                tensor.fill_(7.0)
        saved = partial_folder(self.folder / "saved", 0)
        checkpoint.load(saved, self.model, with_optimizer=True, with_random_state=True)


def straight(folder: Path) -> None:
    run = Run(folder, SAVED_IN)
    run.step("straight 1")
    run.save()
    run.step("straight 2")


def resumed(folder: Path, layout: str) -> None:
    run = Run(folder, layout)
    run.load()
    run.export(f"{layout} 1")
    run.step(f"{layout} 2")


def main(rank: int, folder: Path, ports: list[int]) -> None:
    from miles.backends.megatron_utils.initialize import initialize

    torch.set_num_threads(1)
    worlds = [(SAVED_IN, lambda: straight(folder)), (SAVED_IN, lambda: Run(folder, SAVED_IN, bf16=True).step("bf16 1"))]
    worlds.append(("one", lambda: Run(folder / REPACKAGED, "one").export("again")))
    worlds += [(layout, lambda layout=layout: resumed(folder, layout)) for layout in RESUMED_IN]
    for (layout, work), port in zip(worlds, ports, strict=True):
        if rank < LAYOUTS[layout][0]:
            initialize(run_config(folder / "checkpoint", layout), rank, LAYOUTS[layout][0], f"127.0.0.1:{port}")
            work()
            leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[4]), json.loads(sys.argv[5]))
