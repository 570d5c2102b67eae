"""Attention with one key for all heads: by masks, by gathered picks, and against attention written down in float64."""

import pytest
import torch

from miles.backends.megatron_utils.parts import shared_key_attention as attention
from miles.backends.megatron_utils.parts.packed import packed_sequences
from miles.backends.megatron_utils.parts.shared_key_attention import Visible, shared_key_attention
from miles.backends.megatron_utils.parts.windows import token_spans, windows_of
from miles.weight_sync.live_bytes import LiveBytes

LENGTHS, WINDOW, RATIO, PICKS, HEADS, SIZE = [300, 3, 170, 64], 9, 4, 5, 3, 8


def packed(lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])
    return packed_sequences(torch.tensor([0, *lengths]).cumsum(0).int(), positions, max(lengths), {})


def picks(entries, count) -> torch.Tensor:
    """Random ones for each query, among what it sees."""
    picked_TJ = torch.full((len(entries.low_N), count), -1, dtype=torch.int32)
    for query, (low, high) in enumerate(zip(entries.low_N, entries.high_N, strict=True)):
        chosen = low + torch.randperm(high - low)[:count]
        picked_TJ[query, : len(chosen)] = chosen.int()
    return picked_TJ


def seen_by_hand(lengths, picked_TJ, entries) -> torch.Tensor:
    """bool [T, A]: who sees which token and which entry."""
    total, count = sum(lengths), len(windows_of(packed(lengths), RATIO).tokens_WM)
    mask_TA = torch.zeros(total, total + count, dtype=torch.bool)
    start, first_entry = 0, 0
    for length in lengths:
        for place in range(length):
            query = start + place
            mask_TA[query, max(start, query - WINDOW + 1) : query + 1] = True
            if entries:
                mask_TA[query, total + first_entry : total + first_entry + (place + 1) // RATIO] = True
        start, first_entry = start + length, first_entry + length // RATIO
    if picked_TJ is not None:
        picked_TA = torch.zeros(total, count + 1, dtype=torch.bool).scatter_(1, picked_TJ.long() % (count + 1), True)
        mask_TA[:, total:] &= picked_TA[:, :-1]
    return mask_TA


@pytest.mark.parametrize("kind", ["window", "entries", "picked, by mask", "picked, gathered"])
def test_outputs_and_gradients(kind, monkeypatch):
    monkeypatch.setattr(attention, "GATHERED_FROM", 0 if kind == "picked, gathered" else 10**9)
    monkeypatch.setattr(attention, "BLOCK", 100)  # several, the last one shorter
    torch.manual_seed(0)
    batch = packed(LENGTHS)
    entries = None if kind == "window" else windows_of(batch, RATIO).seen
    picked_TJ = picks(entries, PICKS) if "picked" in kind else None
    total = sum(LENGTHS)
    mask_TA = seen_by_hand(LENGTHS, picked_TJ, entries)
    if entries is None:
        mask_TA = mask_TA[:, :total]
    values = [torch.randn(total, HEADS, SIZE), torch.randn(mask_TA.shape[1], SIZE), torch.randn(HEADS)]
    query, key, sink = (x.clone().requires_grad_() for x in values)
    visible = Visible(token_spans(batch, WINDOW), total, entries, picked_TJ)
    out = shared_key_attention(query, key, sink, visible, 0.3)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), (query, key, sink))

    query, key, sink = (x.double().requires_grad_() for x in values)
    scores = torch.einsum("tnd,ad->tna", query, key) * 0.3
    scores = scores.masked_fill(~mask_TA[:, None], -torch.inf)
    scores = torch.cat((scores, sink[None, :, None].expand(total, -1, 1)), dim=-1)
    expected = torch.einsum("tna,ad->tnd", scores.softmax(-1)[..., :-1], key)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((expected * weights).sum(), (query, key, sink))
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gathered", [False, True])
def test_products_have_even_sizes(gathered, monkeypatch):
    monkeypatch.setattr(attention, "GATHERED_FROM", 0 if gathered else 10**9)
    entries = windows_of(packed(LENGTHS), RATIO).seen
    visible = Visible(token_spans(packed(LENGTHS), WINDOW), sum(LENGTHS), entries, picks(entries, PICKS))
    for _, index, mask_QB in visible.blocks():
        assert index.shape[-1] == mask_QB.shape[1] and mask_QB.shape[1] % attention.ALIGNED == 0


def test_sequences_without_an_entry():
    batch = packed([3, 2])
    entries = windows_of(batch, RATIO).seen
    assert len(windows_of(batch, RATIO).tokens_WM) == 0 == entries.longest
    key = torch.randn(5, SIZE)
    out = shared_key_attention(
        torch.randn(5, HEADS, SIZE), key, torch.zeros(HEADS), Visible(token_spans(batch, WINDOW), 5, entries), 1.0
    )
    assert out.isfinite().all()


def test_memory_grows_with_what_is_picked():
    """Twice as long a sequence takes twice as much, not four times."""

    def peak(length: int) -> int:
        batch = packed([length])
        entries = windows_of(batch, RATIO).seen
        visible = Visible(token_spans(batch, WINDOW), length, entries, picks(entries, PICKS))
        query = torch.randn(length, HEADS, SIZE, requires_grad=True)
        key = torch.randn(length + length // RATIO, SIZE, requires_grad=True)
        with LiveBytes() as alive:
            shared_key_attention(query, key, torch.zeros(HEADS), visible, 1.0).sum().backward()
        return alive.peak

    assert peak(4096) < 2.2 * peak(2048)
