"""Sparse attention in blocks of queries against everything written out at once."""

import types

import pytest
import torch

from miles.backends.megatron_utils.parts import dsa
from miles.backends.megatron_utils.parts.packed import packed_sequences
from miles.backends.megatron_utils.parts.rope import Rope

LENGTHS = [50, 3, 1, 37, 20]
TOPK = 8
ONE_RANK = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def packed_of(lengths, device="cpu"):
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    rope = Rope(torch.tensor([1.0, 0.1]))
    return packed_sequences(torch.tensor([0, *lengths]).cumsum(0).int(), positions, max(lengths), {"indexer": rope})


def indexer_of(heads=16, topk=TOPK):
    config = types.SimpleNamespace(
        dsa_indexer_n_heads=heads,
        dsa_indexer_topk=topk,
        dsa_indexer_head_dim=8,
        q_lora_rank=12,
        hidden_size=20,
        params_dtype=torch.float32,
        sequence_parallel=False,
    )
    torch.manual_seed(0)
    indexer = dsa.Indexer(config, ONE_RANK)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter)
    return indexer


@pytest.mark.parametrize("elements", [2**26, 16 * 50 * 7, 1])
def test_picked_keys(monkeypatch, elements):
    monkeypatch.setattr(dsa, "BLOCK_ELEMENTS", elements)
    indexer, packed = indexer_of(), packed_of(LENGTHS)
    hidden, latent = torch.randn(sum(LENGTHS), 1, 20), torch.randn(sum(LENGTHS), 1, 12)
    picked_TJ = indexer(hidden, latent, packed)
    assert picked_TJ.shape == (sum(LENGTHS), TOPK) and picked_TJ.dtype == torch.int32
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    for start, end in zip(starts, starts[1:], strict=False):
        alone = packed_of([int(end - start)])
        # Without blocks and packing: scores of all pairs.
        monkeypatch.setattr(dsa, "BLOCK_ELEMENTS", 2**26)
        expected = indexer(hidden[start:end], latent[start:end], alone)
        for query, (found, wanted) in enumerate(zip(picked_TJ[start:end], expected, strict=True)):
            found, wanted = found[found >= 0] - start, wanted[wanted >= 0]
            assert len(found) == min(TOPK, query + 1) and found.max() <= query
            assert sorted(found.tolist()) == sorted(wanted.tolist())
        monkeypatch.setattr(dsa, "BLOCK_ELEMENTS", elements)


def picks(num_tokens, topk, device="cpu"):
    """Random earlier keys of each query, itself among them; -1 where it has fewer."""
    generator = torch.Generator().manual_seed(0)
    found_TJ = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    for query in range(num_tokens):
        chosen = torch.randperm(query + 1, generator=generator)[:topk]
        found_TJ[query, : len(chosen)] = chosen
    return found_TJ.to(device)


def written_out(query_TNL, key_KL, picked_TJ, value_size, scale):
    seen_TK = torch.zeros(len(query_TNL), len(key_KL) + 1, dtype=torch.bool, device=key_KL.device)
    seen_TK = seen_TK.scatter(1, torch.where(picked_TJ < 0, len(key_KL), picked_TJ).long(), True)[:, :-1]
    scores_TNK = torch.einsum("tnl,kl->tnk", query_TNL, key_KL) * scale
    weights_TNK = scores_TNK.masked_fill(~seen_TK[:, None], -torch.inf).softmax(-1)
    return weights_TNK @ key_KL[:, :value_size]


@pytest.mark.parametrize("elements", [2**26, 1000, 1])
def test_sparse_attention(monkeypatch, elements):
    monkeypatch.setattr(dsa, "BLOCK_ELEMENTS", elements)
    torch.manual_seed(0)
    query_TNL = torch.randn(40, 4, 12, dtype=torch.float32, requires_grad=True)
    key_KL = torch.randn(40, 12, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(40, 4, 9)
    arguments = (picks(40, 6), 9, 0.3)
    outcomes = []
    for function in (dsa._SparseAttention.apply, written_out):
        out = function(query_TNL, key_KL, *arguments)
        outcomes.append([out, *torch.autograd.grad((out * weight).sum(), (query_TNL, key_KL))])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
