"""Attention over packed sequences against one query at a time, and against transformers' eager attention."""

import functools
import types

import pytest
import torch
from torch.nn.attention import flex_attention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from miles.backends.megatron_utils.parts import kernels
from miles.backends.megatron_utils.parts.attention import AttentionOptions, attend, kernel_for, padded
from miles.backends.megatron_utils.parts.packed import packed_sequences
from miles.training.packing import zigzag_spans

LENGTHS = [9, 1, 40, 17, 33]
HEADS, GROUPS, SIZE, VALUE_SIZE, SCALE = 4, 2, 8, 6, 0.4
OPTIONS = [
    AttentionOptions(),
    AttentionOptions(window=1),
    AttentionOptions(window=5),
    AttentionOptions(window=40),
    AttentionOptions(chunk=8),
    AttentionOptions(chunk=8, window=3),
    AttentionOptions(softcap=0.7),
    AttentionOptions(softcap=0.7, window=5),
    AttentionOptions(sinks=True),
    AttentionOptions(sinks=True, window=5),
    AttentionOptions(temperature=(4.0, 0.5, 1.0)),
    AttentionOptions(temperature=(4.0, 0.5, 0.0), chunk=8),
]


def packed(lengths, rank=0, size=1):
    """Boundaries as one of `size` ranks that share the sequences has them."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = [torch.arange(*span) for n in lengths for span in zigzag_spans(n, rank, size)]
    group = types.SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return packed_sequences(starts, torch.cat(positions), max(lengths), {}, group)


def inputs(num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, HEADS, SIZE), (num_tokens, GROUPS, SIZE), (num_tokens, GROUPS, VALUE_SIZE), (HEADS,)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def one_query_at_a_time(query, key, value, sinks, options, lengths):
    rows, start = [], 0
    for length in lengths:
        for p in range(length):
            q = query[start + p]
            if options.temperature:
                floor, factor, first = options.temperature
                q = q * (1 + factor * torch.log(1 + ((p + first) / torch.tensor(floor)).floor()))
            seen = [
                start + j
                for j in range(p + 1)
                if (options.window is None or p - j < options.window)
                and (options.chunk is None or p // options.chunk == j // options.chunk)
            ]
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = key[seen, group] @ q[head] * SCALE
                if options.softcap:
                    scores = (scores / options.softcap).tanh() * options.softcap
                if options.sinks:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                heads.append(scores.softmax(0)[: len(seen)] @ value[seen, group])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def compare(got, want, leaves, tolerance=2e-6):
    """Outputs, then the gradients of a random weighted sum with respect to `leaves`."""
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((out * weight).sum(), leaves) for out in (got, want)]
    for mine, reference in zip(*grads, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_is_one_query_at_a_time(options):
    query, key, value, sinks = inputs(sum(LENGTHS))
    got = attend(query, key, value, packed(LENGTHS), options, SCALE, sinks if options.sinks else None)
    want = one_query_at_a_time(query, key, value, sinks, options, LENGTHS)
    compare(got, want, [query, key, value, *([sinks] if options.sinks else [])])


def test_the_default_scale_is_of_the_query_size():
    query, key, value, _ = inputs(sum(LENGTHS))
    got, want = (attend(query, key, value, packed(LENGTHS), scale=scale) for scale in (None, SIZE**-0.5))
    assert torch.equal(got, want)


def eager(module, function, query, key, value, window=None, **kwargs):
    """transformers' attention of each sequence alone."""
    outputs, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        q, k, v = (x[rows].transpose(0, 1)[None] for x in (query, key, value))
        ones = torch.ones(length, length, dtype=torch.bool)
        seen = ones.tril() if window is None else ones.tril() & ones.triu(1 - window)
        mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        outputs.append(function(module, q, k, v, mask, scaling=SCALE, dropout=0.0, **kwargs)[0][0])
        start += length
    return torch.cat(outputs)


def test_sinks_are_those_of_gpt_oss():
    query, key, value, sinks = inputs(sum(LENGTHS))
    module = types.SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    want = eager(module, modeling_gpt_oss.eager_attention_forward, query, key, value, window=5)
    got = attend(query, key, value, packed(LENGTHS), AttentionOptions(window=5, sinks=True), SCALE, sinks)
    compare(got, want, [query, key, value, sinks])


def test_the_softcap_is_gemma_2s():
    query, key, value, _ = inputs(sum(LENGTHS))
    module = types.SimpleNamespace(num_key_value_groups=HEADS // GROUPS, head_dim=SIZE, training=False)
    want = eager(module, modeling_gemma2.eager_attention_forward, query, key, value, softcap=0.5)
    got = attend(query, key, value, packed(LENGTHS), AttentionOptions(softcap=0.5), SCALE)
    compare(got, want, [query, key, value])


def test_padding_behind_the_samples_changes_nothing():
    query, key, value, _ = inputs(sum(LENGTHS) + 60)
    for options in (AttentionOptions(), AttentionOptions(window=5), AttentionOptions(softcap=0.7)):
        long = attend(query, key, value, packed([*LENGTHS, 60]), options)[: sum(LENGTHS)]
        short = attend(*(x[: sum(LENGTHS)] for x in (query, key, value)), packed(LENGTHS), options)
        compare(long, short, [query, key, value])


def test_bfloat16_in_and_out():
    query, key, value, sinks = inputs(sum(LENGTHS), torch.bfloat16)
    for options in (AttentionOptions(), AttentionOptions(softcap=0.7, sinks=True, temperature=(4.0, 0.5, 0.0))):
        out = attend(query, key, value, packed(LENGTHS), options, SCALE, sinks if options.sinks else None)
        want = one_query_at_a_time(*(x.float() for x in (query, key, value, sinks)), options, LENGTHS)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rank, size", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[4], OPTIONS[5]], ids=str)
def test_a_block_mask_holds_what_is_seen(options, rank, size):
    boundaries = packed([300, 8, 128, 64, 4], rank, size)
    mask = kernels.block_mask(boundaries, options.chunk, options.window)
    first, last = boundaries.seen_keys(options.chunk, options.window)
    block, keys = kernels.BLOCK, torch.arange(-(-504 // kernels.BLOCK) * kernels.BLOCK)
    columns = len(keys) // block
    partial, full = torch.zeros(2, -(-len(first) // block), columns, dtype=torch.bool)
    for row in range(len(full)):
        partial[row, mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]]] = True
        full[row, mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]]] = True
        queries = slice(row * block, (row + 1) * block)
        seen = ((keys >= first[queries, None]) & (keys <= last[queries, None])).view(-1, columns, block)
        assert (partial | full)[row][seen.any(2).any(0)].all(), "a block that is seen is left out"
        assert torch.equal(full[row], seen.all(2).all(0)), (
            "a block needs no mask where all of it is seen, and only there"
        )
    assert not (partial & full).any()
    # Neither what lies behind the queries nor other sequences: few blocks are computed in vain.
    assert size > 1 or (partial | full).sum() < 0.65 * full.numel()


@pytest.mark.parametrize("options", [o for o in OPTIONS if not o.temperature and o != OPTIONS[1]], ids=str)
def test_the_flex_kernel_is_the_padded_one(monkeypatch, options):
    # Uncompiled it runs on a CPU, forward only.
    monkeypatch.setattr(kernels, "_compiled_flex", lambda: kernels.flex_attention)
    lengths = [140, 3, 60]
    query, key, value, sinks = (x.detach() for x in inputs(sum(lengths)))
    arguments = query, key, value, packed(lengths), options, SCALE, sinks if options.sinks else None
    torch.testing.assert_close(kernels.flex(*arguments), padded(*arguments), rtol=0, atol=2e-6)


@pytest.fixture
def traced_on_the_cpu(monkeypatch):
    """The compiled kernel as a GPU traces it, forward and backward, up to the code generation, which needs a GPU."""
    # torch has no kernel for gradients on a CPU and refuses them; traced, they are computed without one.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    kernels._compiled_flex.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    kernels._compiled_flex.cache_clear()
    torch._dynamo.reset()


def test_the_traced_flex_kernel_is_the_padded_one_and_the_same_for_all_lengths(traced_on_the_cpu):
    options = AttentionOptions(softcap=0.7, window=50, sinks=True)
    for lengths in ([300, 3, 60], [140], [129, 20, 400]):
        query, key, value, sinks = inputs(sum(lengths))
        arguments = query, key, value, packed(lengths), options, SCALE, sinks
        compare(kernels.flex(*arguments), padded(*arguments), [query, key, value, sinks])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_flex_kernel_has_more_variants_than_torch_would_compile(traced_on_the_cpu):
    query, key, value, _ = (x.detach() for x in inputs(300))
    with torch._dynamo.config.patch(recompile_limit=1):
        for cap in (0.7, 0.8):
            kernels.flex(query, key, value, packed([300]), AttentionOptions(softcap=cap), SCALE, None)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_the_kernel_follows_device_type_sizes_and_options():
    def chosen(dtype, size, value_size, options, is_cuda=True):
        query, value = (
            types.SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(3, 2, s)) for s in (size, value_size)
        )
        return kernel_for(query, value, options)

    plain, half = AttentionOptions(), torch.bfloat16
    assert chosen(half, 128, 128, plain, is_cuda=False) is padded
    for options in (
        plain,
        AttentionOptions(window=9),
        AttentionOptions(chunk=9),
        AttentionOptions(temperature=(1, 1, 1)),
    ):
        assert chosen(half, 128, 128, options) is chosen(half, 192, 128, options) is kernels.varlen
    for options in (AttentionOptions(softcap=1.0), AttentionOptions(sinks=True)):
        assert chosen(half, 128, 128, options) is kernels.flex
    for dtype, size, value_size in ((torch.float32, 64, 64), (half, 320, 64), (half, 20, 20), (half, 64, 128)):
        assert chosen(dtype, size, value_size, plain) is kernels.flex
