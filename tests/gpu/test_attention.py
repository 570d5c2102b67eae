"""The kernels of a GPU against the padded computation in float32, their gradients, and their memory."""

import types

import pytest
import torch

from miles.backends.megatron_utils.parts import kernels
from miles.backends.megatron_utils.parts.attention import AttentionOptions, attend, kernel_for, padded
from miles.backends.megatron_utils.parts.packed import packed_sequences
from miles.training.packing import zigzag_spans

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = [1000, 24, 8, 3000, 512, 1576, 16]
PLAIN = [
    AttentionOptions(),
    AttentionOptions(window=100),
    AttentionOptions(chunk=300),
    AttentionOptions(chunk=300, window=100),
    AttentionOptions(temperature=(100.0, 0.3, 1.0)),
]
SPECIAL = [
    AttentionOptions(softcap=5.0),
    AttentionOptions(softcap=5.0, window=100),
    AttentionOptions(sinks=True),
    AttentionOptions(sinks=True, window=128),
    AttentionOptions(sinks=True, softcap=5.0, chunk=300),
]
# Query heads, key heads, head size, values' head size.
SHAPES = {"grouped": (8, 2, 64, 64), "large": (4, 2, 256, 256), "latent": (4, 4, 192, 128)}
HALF_BOUND, FLOAT_BOUND = 2e-2, 2e-4  # relative to the largest value


def boundaries(lengths, device, cp_group=None, rank=0):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    size = 1 if cp_group is None else cp_group.size()
    positions = [torch.arange(a, b) for n in lengths for a, b in zigzag_spans(n, rank, size)]
    return packed_sequences(starts, torch.cat(positions).to(device), max(lengths), {}, cp_group)


def inputs(shape, num_tokens, dtype, device="cuda"):
    heads, groups, size, value_size = shape
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, heads, size), (num_tokens, groups, size), (num_tokens, groups, value_size), (heads,)
    tensors = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    weight = torch.randn(num_tokens, heads, value_size, generator=generator).to(dtype)
    return [x.to(device).requires_grad_() for x in tensors], weight.to(device)


def outcome(options, leaves, weight, packed, function=attend, **kwargs):
    """Output, then gradients, on the CPU in float32."""
    leaves = leaves if options.sinks else leaves[:3]
    out = function(*leaves[:3], packed, options, sinks_N=leaves[3] if options.sinks else None, **kwargs)
    grads = torch.autograd.grad((out.float() * weight.float()).sum(), leaves)
    return [x.detach().float().cpu() for x in (out, *grads)]


def assert_near(got, want, bound):
    names = ("output", "query", "key", "value", "sinks")[: len(want)]
    errors = {n: ((g - w).abs().max() / w.abs().max()).item() for n, g, w in zip(names, got, want, strict=True)}
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < bound, errors


def reference(shape, options, dtype):
    """On the CPU in float32, from the same rounded inputs."""
    leaves, weight = inputs(shape, sum(LENGTHS), dtype, "cpu")
    leaves = [x.detach().float().requires_grad_() for x in leaves]
    return outcome(options, leaves, weight, boundaries(LENGTHS, "cpu"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", PLAIN + SPECIAL, ids=str)
def test_bfloat16(options, shape):
    leaves, weight = inputs(SHAPES[shape], sum(LENGTHS), torch.bfloat16)
    wanted_kernel = kernels.varlen if options in PLAIN else kernels.flex
    assert kernel_for(leaves[0], leaves[2], options) is wanted_kernel
    got = outcome(options, leaves, weight, boundaries(LENGTHS, "cuda"))
    assert_near(got, reference(SHAPES[shape], options, torch.bfloat16), HALF_BOUND)


@pytest.mark.parametrize("options", PLAIN[:2] + SPECIAL[3:], ids=str)
def test_float32(options):
    leaves, weight = inputs(SHAPES["grouped"], sum(LENGTHS), torch.float32)
    assert kernel_for(leaves[0], leaves[2], options) is kernels.flex
    got = outcome(options, leaves, weight, boundaries(LENGTHS, "cuda"))
    assert_near(got, reference(SHAPES["grouped"], options, torch.float32), FLOAT_BOUND)


@pytest.mark.parametrize("kernel", [kernels.varlen, kernels.flex], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("options", PLAIN[:4], ids=str)
def test_a_context_parallel_rank(options, kernel):
    """Runs with more keys than queries: the kernel must align their ends. The gather is done by hand."""
    size, rank, scale = 2, 1, 0.125
    (query, key, value, _), weight = inputs(SHAPES["grouped"], sum(LENGTHS), torch.bfloat16)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    held = [
        torch.cat(
            [
                torch.arange(s + a, s + b)
                for s, n in zip(starts, LENGTHS, strict=False)
                for a, b in zigzag_spans(n, r, size)
            ]
        )
        for r in range(size)
    ]
    group = types.SimpleNamespace(rank=lambda: rank, size=lambda: size)
    results = []
    for device, function in (("cpu", padded), ("cuda", kernel)):
        leaves = [query[held[rank]], key[torch.cat(held)], value[torch.cat(held)]]
        leaves = [
            x.detach().to(device).float().requires_grad_() if device == "cpu" else x.detach().requires_grad_()
            for x in leaves
        ]
        packed = boundaries(LENGTHS, device, group, rank)
        own_weight = weight[held[rank]].to(device)
        results.append(
            outcome(options, leaves, own_weight, packed, lambda *a, sinks_N, f=function: f(*a, scale, sinks_N))
        )
    assert_near(results[1], results[0], HALF_BOUND)


def peak(options, dtype, lengths):
    """Bytes beyond the inputs that a forward and a backward pass take."""
    leaves, weight = inputs(SHAPES["grouped"], sum(lengths), dtype)
    for _ in range(2):  # the first may compile
        packed = boundaries(lengths, "cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = attend(*leaves[:3], packed, options, sinks_N=leaves[3] if options.sinks else None)
        grads = torch.autograd.grad(out, leaves if options.sinks else leaves[:3], weight)
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        del out, grads, packed
    return taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [*PLAIN[:3], SPECIAL[1], SPECIAL[3]], ids=str)
def test_memory_grows_with_the_length(options, dtype):
    short, long = (peak(options, dtype, [n]) for n in (16384, 65536))
    print(f"{short / 2**20:.0f} MiB at 16k, {long / 2**20:.0f} MiB at 64k")
    # Exactly linear, but for the table of blocks: one number for 128 x 128 scores.
    assert long < 4.5 * short
    # All scores of one head at 64k would take this much in bfloat16.
    assert long < 65536**2 * 2 / 4


def test_many_lengths_are_one_compilation():
    torch._dynamo.reset()
    kernels._compiled_flex.cache_clear()
    torch._dynamo.utils.counters.clear()
    for length in (300, 511, 512, 1024, 1500, 4096):
        leaves, weight = inputs(SHAPES["grouped"], length, torch.bfloat16)
        outcome(SPECIAL[1], leaves, weight, boundaries([length], "cuda"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
