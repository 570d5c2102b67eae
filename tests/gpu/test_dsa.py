"""Sparse latent attention on a GPU: as written out at once, in memory that grows with the tokens alone."""

import pytest
import torch

from miles.backends.megatron_utils.parts import dsa
from tests.fast.backends.megatron_utils.parts.test_dsa import LENGTHS, indexer_of, packed_of, picks, written_out

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_picked_keys():
    indexer = indexer_of()
    hidden, latent = torch.randn(sum(LENGTHS), 1, 20), torch.randn(sum(LENGTHS), 1, 12)
    expected = indexer(hidden, latent, packed_of(LENGTHS))
    found = indexer.cuda()(hidden.cuda(), latent.cuda(), packed_of(LENGTHS, "cuda"))
    assert torch.equal(found.cpu().sort(1).values, expected.sort(1).values)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_sparse_attention(dtype, bound):
    torch.manual_seed(0)
    leaves = [torch.randn(300, 4, 576), torch.randn(300, 576)]
    weight, arguments = torch.randn(300, 4, 512), (picks(300, 64), 512, 0.04)
    outcomes = []
    for device, kind, function in (("cuda", dtype, dsa._SparseAttention.apply), ("cpu", torch.float32, written_out)):
        query, key = (x.to(dtype).to(device, kind).requires_grad_() for x in leaves)
        out = function(query, key, arguments[0].to(device), *arguments[1:])
        gradients = torch.autograd.grad((out.float() * weight.to(device)).sum(), (query, key))
        outcomes.append([x.detach().float().cpu() for x in (out, *gradients)])
    for found, expected in zip(*outcomes, strict=True):
        assert (found - expected).abs().max() < bound * expected.abs().max()


def test_memory():
    """16k tokens: the scores of 16 heads for all pairs would take 16 GiB in float32."""
    length, topk = 2**14, 2048
    query = torch.randn(length, 16, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key = torch.randn(length, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows = torch.arange(length, device="cuda", dtype=torch.int32)[:, None]
    picked = rows - torch.arange(topk, device="cuda", dtype=torch.int32)
    picked = torch.where(picked < 0, -1, picked)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dsa._SparseAttention.apply(query, key, picked, 512, 0.04).float().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 6 * 2**30
    indexer = indexer_of(heads=64, topk=topk).cuda()
    hidden, latent = torch.randn(length, 1, 20, device="cuda"), torch.randn(length, 1, 12, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    indexer(hidden, latent, packed_of([length], "cuda"))
    assert torch.cuda.max_memory_allocated() - before < 6 * 2**30
