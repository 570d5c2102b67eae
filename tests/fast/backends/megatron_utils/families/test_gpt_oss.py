"""The layouts of gpt-oss' experts."""

import pytest
import torch

from miles.hf.expert_layouts import FusedDown, FusedGateUp


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "shape", "shard"),
    [
        (FusedGateUp(interleaved=True), (3, 5, 16), lambda n: (3, 16 // n, 5)),
        (FusedGateUp(interleaved=False), (3, 5, 16), lambda n: (3, 16 // n, 5)),
        (FusedGateUp(interleaved=True), (3, 16), lambda n: (3, 16 // n)),
        (FusedDown(), (3, 8, 5), lambda n: (3, 5, 8 // n)),
    ],
)
def test_fused_experts_keep_every_bit(kind, shape, shard, size):
    tensor = torch.randn(shape)
    shards = [kind.split([tensor], rank, size) for rank in range(size)]
    assert {tuple(part.shape) for part in shards} == {shard(size)}
    (merged,) = kind.merge(shards)
    assert torch.equal(merged, tensor)


def test_where_gate_and_up_are():
    fused = torch.tensor([[0.0, 10, 1, 11, 2, 12, 3, 13]])
    assert FusedGateUp(interleaved=True).split([fused], 1, 2).tolist() == [[2, 3, 12, 13]]
    fused = torch.tensor([[0.0, 1, 2, 3, 10, 11, 12, 13]])
    assert FusedGateUp(interleaved=False).split([fused], 1, 2).tolist() == [[2, 3, 12, 13]]
