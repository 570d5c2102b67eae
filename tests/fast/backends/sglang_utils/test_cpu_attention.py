"""Attention by groups of equal length gives SGLang's own numbers, whatever else is in the batch."""

from functools import partial

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from miles.backends.sglang_utils import cpu_attention

HEADS, KV_HEADS, WIDTH, SLOTS = 4, 2, 16, 400
HOW = {"scaling": WIDTH**-0.5, "enable_gqa": True, "is_cross_attn": False, "sliding_window_size": None}
DECODE, EXTEND = TorchNativeAttnBackend._run_sdpa_forward_decode, TorchNativeAttnBackend._run_sdpa_forward_extend

# Numbers of about 1, from at most 30 keys. Several sequences and one take their sums in another order on some
# processors and numbers of threads; a wrong key would change them by 0.1 and more.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def assert_equal_to_rounding(given, wanted):
    torch.testing.assert_close(given, wanted, rtol=ROUNDING[wanted.dtype], atol=ROUNDING[wanted.dtype])


def world(seq_lens, dtype=torch.float32):
    """Cache, slot table, and row of the table, of sequences whose slots are scattered."""
    draw = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(SLOTS, KV_HEADS, WIDTH, generator=draw).to(dtype) for _ in range(2))
    table = torch.randint(SLOTS, (len(seq_lens) + 3, max(seq_lens)), generator=draw, dtype=torch.int32)
    requests = torch.randperm(len(table), generator=draw)[: len(seq_lens)]
    return k_cache, v_cache, table, requests, torch.tensor(seq_lens)


def queries(count, dtype=torch.float32):
    return torch.randn(count, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seq_lens", [[5], [1, 9, 5, 9, 1, 5, 30, 5]])
def test_decode_is_sglangs(seq_lens, dtype, cache_dtype):
    inputs = (*world(seq_lens, cache_dtype),)
    query = queries(len(seq_lens), dtype)
    wanted = DECODE(None, query, torch.empty_like(query), *inputs, causal=False, **HOW)
    given = cpu_attention.decode(DECODE, None, query, torch.full_like(query, torch.nan), *inputs, causal=False, **HOW)
    assert_equal_to_rounding(given, wanted)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "prefix_lens, extend_lens", [([0], [7]), ([0, 4, 4, 2, 0, 4], [9, 5, 1, 7, 9, 5]), ([3, 3], [4, 4])]
)
def test_extend_is_sglangs(prefix_lens, extend_lens, causal):
    seq_lens = [a + b for a, b in zip(prefix_lens, extend_lens, strict=True)]
    inputs = (*world(seq_lens), torch.tensor(prefix_lens), torch.tensor(extend_lens))
    query = queries(sum(extend_lens))
    wanted = EXTEND(None, query, torch.empty_like(query), *inputs, causal=causal, **HOW)
    given = cpu_attention.extend(EXTEND, None, query, torch.full_like(query, torch.nan), *inputs, causal=causal, **HOW)
    assert_equal_to_rounding(given, wanted)


def test_a_sequence_does_not_depend_on_the_others():
    k_cache, v_cache, table, requests, seq_lens = world([5, 9, 5, 30, 5])
    query = queries(5)
    run = partial(cpu_attention.decode, DECODE, None, causal=False, **HOW)
    together = run(query, torch.empty_like(query), k_cache, v_cache, table, requests, seq_lens)
    for row in range(5):
        one = slice(row, row + 1)
        alone = run(query[one], torch.empty_like(query[one]), k_cache, v_cache, table, requests[one], seq_lens[one])
        assert_equal_to_rounding(alone, together[one])


def test_windows_and_encoders_are_left_to_sglang():
    calls = []

    def original(*args, **how):
        calls.append((args, how))

    decode = ("query", "output", "k", "v", "table", "requests", "seq_lens")
    window = HOW | {"causal": True, "sliding_window_size": 4}
    cpu_attention.decode(original, None, *decode, **window)
    cpu_attention.extend(original, None, *decode, "prefix", "extend", "encoder", **HOW)
    assert [call[0][1:] for call in calls] == [(*decode, None), (*decode, "prefix", "extend", "encoder")]
    assert [call[1] for call in calls] == [window, HOW]
