import pytest
import torch

from miles.hf.layouts import Column, Gated, Qkv, Replicated, Row, Vocab
from miles.hf.vocab import padded_vocab_size

KINDS = [
    (Replicated(), [(8,)], (8,)),
    (Column(), [(8, 6)], (2, 6)),
    (Row(), [(6, 8)], (6, 2)),
    (Vocab(13), [(13, 6)], (4, 6)),
    (Vocab(5), [(5, 6)], (2, 6)),
    (Gated(), [(8, 6), (8, 6)], (4, 6)),
    (Qkv(4, 3, 2), [(24, 6), (8, 6), (8, 6)], (10, 6)),
    (Qkv(4, 3, 2), [(24,), (8,), (8,)], (10,)),
]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("kind, shapes, _", KINDS)
def test_split_then_merge_keeps_every_bit(kind, shapes, _, tp_size):
    tensors = [torch.randn(shape) for shape in shapes]
    merged = kind.merge([kind.split(tensors, rank, tp_size) for rank in range(tp_size)])
    assert len(merged) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(merged, tensors, strict=True))


@pytest.mark.parametrize("kind, shapes, shard_shape", KINDS)
def test_shape_of_a_shard_at_tp_4(kind, shapes, shard_shape):
    tensors = [torch.randn(shape) for shape in shapes]
    assert all(kind.split(tensors, rank, 4).shape == shard_shape for rank in range(4))


def test_qkv_interleaves_by_group():
    # Two groups of two query heads, one row a head: q0 q1 k0 v0 | q2 q3 k1 v1.
    query, key, value = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    kind = Qkv(groups=2, queries=2, head_dim=1)
    assert kind.split([query, key, value], 0, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert kind.split([query, key, value], 1, 2).tolist() == [2, 3, 11, 21]


def test_gated_keeps_a_ranks_gate_rows_before_its_up_rows():
    gate, up = torch.arange(4.0), torch.arange(10.0, 14.0)
    assert Gated().split([gate, up], 1, 2).tolist() == [2, 3, 12, 13]


def test_padded_vocabulary_rows_are_zero():
    table = torch.ones(5, 2)
    assert padded_vocab_size(5, 4) == 8
    last, before = Vocab(5).split([table], 3, 4), Vocab(5).split([table], 2, 4)
    assert last.eq(0).all() and before.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("kind, shapes", [(Qkv(2, 2, 4), [(16, 6), (8, 6), (8, 6)]), (Gated(), [(6, 6), (6, 6)])])
def test_uneven_cut_is_refused(kind, shapes):
    with pytest.raises(ValueError, match="tensor_model_parallel_size=4"):
        kind.split([torch.randn(shape) for shape in shapes], 0, 4)
