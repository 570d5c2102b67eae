"""Engines of another format than the checkpoint's: 8-bit weights with a scale a block. Each rank runs this file."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from miles.hf.checkpoint import CheckpointIndex
from miles.weight_sync.format import CheckpointFormat, Fp8Format
from miles.weight_sync.live_bytes import LiveBytes
from miles.weight_sync.plan import plan_buckets
from miles.weight_sync.source import FullTensor, SourcePart
from tests.fast.weight_sync.conftest import expert_checkpoint, grid
from tests.fast.weight_sync.fake_engine import Engine
from tests.fast.weight_sync.test_updater import build

BLOCK = 8
LIMIT = 16_000


class BlockwiseInt8:
    """Matrices as int8 [..., I] and float32 [..., I / 8], the largest number of each block being 127; vectors as is."""

    def encode(self, name, tensor):
        if tensor.dim() < 2 or tensor.shape[-1] % BLOCK:
            return {name: tensor}
        blocks = tensor.float().unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1).clamp(min=1e-12) / 127
        return {name: (blocks / scale[..., None]).round().to(torch.int8).flatten(-2), name + "_scale": scale}


class Fp8Matrices(Fp8Format):
    """Every matrix as FP8."""

    def __init__(self, folder):
        shapes = CheckpointIndex(folder).shapes
        super().__init__(name for name, shape in shapes.items() if len(shape) == 2)


FORMATS = {"int8": lambda folder: BlockwiseInt8(), "fp8": Fp8Matrices}


class Wrong(BlockwiseInt8):
    """Does not keep to what it gave for the plan."""

    def encode(self, name, tensor):
        encoded = super().encode(name, tensor)
        return encoded if tensor.is_meta else {key: value.double() for key, value in encoded.items()}


def part(name, *shape, dtype=torch.bfloat16):
    return SourcePart(name, (FullTensor(name, shape, dtype),))


def test_what_is_sent_is_planned_before_there_are_values():
    (bucket,) = plan_buckets([part("norm", 16), part("w", 4, 16)], BlockwiseInt8(), 10_000)
    assert [(slot.name, slot.shape, slot.dtype) for slot in bucket.slots.values()] == [
        ("w_scale", (4, 2), torch.float32),
        ("norm", (16,), torch.bfloat16),
        ("w", (4, 16), torch.int8),
    ]
    assert bucket.nbytes == 4 * 2 * 4 + 16 * 2 + 4 * 16
    (plain,) = plan_buckets([part("norm", 16), part("w", 4, 16)], CheckpointFormat(), 10_000)
    assert plain.scratch == 0 and bucket.scratch >= 4 * 16 * 4


def test_fp8_is_planned_with_its_scales():
    parts = [part("a.q_proj.weight", 200, 300), part("norm", 300)]
    (bucket,) = plan_buckets(parts, Fp8Format({"a.q_proj.weight"}), 2_000_000)
    assert [(slot.name, slot.shape, slot.dtype) for slot in bucket.slots.values()] == [
        ("a.q_proj.weight_scale_inv", (2, 3), torch.float32),
        ("norm", (300,), torch.bfloat16),
        ("a.q_proj.weight", (200, 300), torch.float8_e4m3fn),
    ]


def test_one_name_for_two_tensors_is_refused():
    with pytest.raises(AssertionError, match="two tensors of the source give the same one"):
        plan_buckets([part("w", 4, 16), part("w_scale", 4)], BlockwiseInt8(), 10_000)


@pytest.fixture
def engines():
    made = [Engine(), Engine()]
    yield made
    for engine in made:
        engine.close()


def check(engine, folder, kind="int8"):
    index, expected = CheckpointIndex(folder), {}
    for name in index.files:
        expected |= FORMATS[kind](folder).encode(name, index.read(name))
    assert len(expected) > len(index) and engine.received[0].keys() == expected.keys()
    for name, tensor in engine.received[0].items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.fixture
def one_process(tmp_path):
    expert_checkpoint(tmp_path / "model")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda targets, engine_format: build(
        tmp_path / "model", grid(lambda _: None, 0, 1), 0, targets, LIMIT, engine_format
    )[0]
    dist.destroy_process_group()


def test_encoding_stays_within_the_memory_of_two_buckets(one_process, engines, tmp_path):
    updater = one_process([[engines[0].url, 1, [0]]], BlockwiseInt8())
    assert len(updater.gatherer.buckets) >= 3
    with LiveBytes() as counted:
        updater.update(1)
    check(engines[0], tmp_path / "model")
    assert counted.peak <= 2 * LIMIT


def test_a_format_that_gives_something_else_for_values_is_a_fault_of_its_own(one_process, engines):
    updater = one_process([[engines[0].url, 1, [0]]], Wrong())
    with pytest.raises(AssertionError, match="float64 was given, .* planned"):
        updater.update(1)
    assert engines[0].version is None


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("mode", ["broadcast", "disk"])
def test_shards_become_encoded_tensors_on_every_way(run_ranks, engines, tmp_path, mode, kind):
    """Cut by tensor and expert parallelism; --check-weight-update-equal compares what is encoded."""
    expert_checkpoint(tmp_path / "model")
    (tmp_path / "shared").mkdir()
    local, remote = engines
    targets = [[local.url, 1, [1]], [remote.url, 1, None]]
    changes = dict(transfer_mode=mode, check_equal=True)
    if mode == "disk":
        changes["disk_folder"] = str(tmp_path / "shared")
    run_ranks(__file__, 2, str(tmp_path / "model"), json.dumps([kind, targets, changes]))
    for engine in engines:
        check(engine, tmp_path / "model", kind)
        assert engine.version == "1" and engine.resets == 1


def main(rank, world_size, store, folder, task):
    """One update of the weights as they are."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    kind, targets, changes = json.loads(task)
    parallel = grid(dist.new_group, rank, world_size, tp=2, ep=2)
    updater, _ = build(folder, parallel, rank, targets, LIMIT, FORMATS[kind](folder), **changes)
    updater.update(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
