"""Attention of ranks that share sequences against attention of one rank. Each rank runs this file."""

import sys

import torch
import torch.distributed as dist

from miles.backends.megatron_utils.parts import kernels
from miles.backends.megatron_utils.parts.attention import AttentionOptions, attend, padded
from miles.backends.megatron_utils.parts.context_parallel import gather_tokens
from miles.backends.megatron_utils.parts.packed import packed_sequences
from miles.backends.trainer.context_parallel import combined
from miles.training.packing import zigzag_spans

LENGTHS = [16, 4, 40, 24]
OPTIONS = [
    AttentionOptions(),
    AttentionOptions(window=5),
    AttentionOptions(chunk=6),
    AttentionOptions(chunk=6, window=4),
    AttentionOptions(softcap=0.7, window=2),
    AttentionOptions(sinks=True),
    AttentionOptions(temperature=(4.0, 0.5, 1.0)),
]
FLASH = [options for options in OPTIONS if options.softcap is None and not options.sinks]


def whole():
    """Queries, keys, values (narrower), sinks, weights of the outputs, boundaries and positions of all tokens."""
    generator, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = (total, 4, 8), (total, 2, 8), (total, 2, 6), (4,), (total, 4, 6)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return tensors, starts, torch.cat([torch.arange(length) for length in LENGTHS])


def held(rank, size):
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    spans = [(start, zigzag_spans(length, rank, size)) for start, length in zip(starts, LENGTHS, strict=False)]
    return torch.cat([torch.arange(start + a, start + b) for start, pairs in spans for a, b in pairs])


def one_run_at_a_time(query, key, value, starts_q, starts_k, max_q, max_k, *, scale, window_size):
    """What torch's varlen_attn computes on a GPU; on a CPU it does not exist."""
    left, right = window_size
    assert right == 0 and (max_q, max_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
    outputs = []
    for (q0, q1), (k0, k1) in zip(
        *(torch.stack((s[:-1], s[1:]), 1).tolist() for s in (starts_q, starts_k)), strict=True
    ):
        last = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
        keys = torch.arange(k1 - k0)
        seen = (keys <= last) & ((keys >= last - left) | (left < 0))
        q, k, v = (
            x[rows].transpose(0, 1)
            for x, rows in ((query, slice(q0, q1)), (key, slice(k0, k1)), (value, slice(k0, k1)))
        )
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def attention(rank, size):
    (query, key, value, sinks, weight), starts, positions = whole()
    mine, group = held(rank, size), dist.group.WORLD
    everything = packed_sequences(starts, positions, max(LENGTHS), {})
    for options in OPTIONS:
        leaves = [x.clone().requires_grad_() for x in (query, key, value, sinks)]
        out = attend(*leaves[:3], everything, options, sinks_N=leaves[3] if options.sinks else None)
        wanted = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
        part = packed_sequences(starts, positions[mine], max(LENGTHS), {}, group)
        own = [x[mine].clone().requires_grad_() for x in (query, key, value)] + [sinks.clone().requires_grad_()]
        got = attend(*own[:3], part, options, sinks_N=own[3] if options.sinks else None)
        torch.testing.assert_close(got, out[mine], rtol=0, atol=2e-6)
        grads = torch.autograd.grad((got * weight[mine]).sum(), own, allow_unused=True)
        for grad, want in zip(grads[:3], wanted, strict=False):
            torch.testing.assert_close(grad, want[mine], rtol=0, atol=1e-5)
        if options.sinks:
            # A parameter's gradients are summed over the ranks by Megatron.
            dist.all_reduce(grads[3])
            torch.testing.assert_close(grads[3], wanted[3], rtol=0, atol=1e-5)
        gathered = [gather_tokens(x[mine], group) for x in (key, value)]
        arguments = query[mine], *gathered, part, options, 0.3, sinks if options.sinks else None
        expected = padded(*arguments)
        torch.testing.assert_close(kernels.flex(*arguments), expected, rtol=0, atol=2e-6)
        if options in FLASH:
            torch.testing.assert_close(kernels.varlen(*arguments), expected, rtol=0, atol=2e-6)


def results(rank, size):
    """Each rank has some numbers; a number that none has, or two, is NaN on all."""
    values = torch.full((4,), torch.nan)
    values[rank] = 0.5 + rank
    values[2] = -1.0
    got = combined(values, dist.group.WORLD, "cpu")
    assert got[:2].tolist() == [0.5, 1.5] and got[2:].isnan().all()


def main(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    # Uncompiled it runs on a CPU, forward only.
    kernels._compiled_flex = lambda: kernels.flex_attention
    torch.nn.attention.varlen.varlen_attn = one_run_at_a_time
    attention(rank, size)
    results(rank, size)
    dist.barrier()


def test_two_ranks_attend_as_one(run_ranks):
    run_ranks(__file__, 2)


def test_varlen_without_context_parallelism(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_run_at_a_time)
    (query, key, value, *_), starts, positions = whole()
    boundaries = packed_sequences(starts, positions, max(LENGTHS), {})
    for options in FLASH:
        arguments = query, key, value, boundaries, options, 0.3, None
        torch.testing.assert_close(kernels.varlen(*arguments), padded(*arguments), rtol=0, atol=2e-6)


if __name__ == "__main__":
    import torch.nn.attention.varlen

    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
