import sys

import pytest
import torch
import torch.distributed as dist

from miles.training.vocab_parallel import log_probs_and_entropy
from miles.weight_sync.live_bytes import LiveBytes

TOKENS, HIDDEN, VOCAB, PADDED = 7, 6, 21, 32
TARGET_N = torch.tensor([0, 20, 15, 16, 7, 3, 19])


def make_case(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(TOKENS, HIDDEN, generator=generator) * 2
    weight_VH = torch.randn(PADDED, HIDDEN, generator=generator) * 2
    return hidden_NH.to(dtype), weight_VH.to(dtype), torch.randn(2, TOKENS, generator=generator)


def expected(hidden_NH, weight_VH, weights, temperature, entropy_grad, softcap=None):
    """Plain log_softmax in float64: log-probabilities, entropy, and the gradients of their weighted sum."""
    hidden_NH, weight_VH = (x.double().requires_grad_() for x in (hidden_NH, weight_VH))
    logits_NV = hidden_NH @ weight_VH[:VOCAB].t()
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    log_p_NV = torch.log_softmax(logits_NV / temperature, dim=1)
    log_probs_N = log_p_NV.gather(1, TARGET_N[:, None])[:, 0]
    entropy_N = -(log_p_NV.exp() * log_p_NV).sum(dim=1)
    loss = (log_probs_N * weights[0]).sum() + ((entropy_N * weights[1]).sum() if entropy_grad else 0)
    loss.backward()
    return [x.detach().float() for x in (log_probs_N, entropy_N, hidden_NH.grad, weight_VH.grad)]


def computed(rank, size, group, case, temperature, entropy_grad, softcap=None, chunk_size=4):
    """The same from `log_probs_and_entropy`, on this rank's rows of the weight."""
    hidden_NH, weight_VH, weights = case
    rows = slice(rank * PADDED // size, (rank + 1) * PADDED // size)
    hidden_NH, weight_VH = hidden_NH.clone().requires_grad_(), weight_VH[rows].clone().requires_grad_()
    log_probs_N, entropy_N = log_probs_and_entropy(
        hidden_NH, weight_VH, TARGET_N, temperature, group, entropy_grad, VOCAB, softcap, chunk_size
    )
    assert entropy_N.requires_grad == entropy_grad and log_probs_N.dtype == entropy_N.dtype == torch.float32
    loss = (log_probs_N * weights[0]).sum() + ((entropy_N * weights[1]).sum() if entropy_grad else 0)
    loss.backward()
    assert hidden_NH.grad.dtype == weight_VH.grad.dtype == hidden_NH.dtype
    if group is not None:
        dist.all_reduce(hidden_NH.grad, group=group)
    return [x.detach().float() for x in (log_probs_N, entropy_N, hidden_NH.grad, weight_VH.grad)]


def check(rank, size, group, dtype, **options):
    case = make_case(dtype)
    got, want = computed(rank, size, group, case, **options), expected(*case, **options)
    want[3] = want[3][rank * PADDED // size : (rank + 1) * PADDED // size]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b, relative in zip(got, want, [1e-5, 1e-5, tolerance, tolerance], strict=True):
        torch.testing.assert_close(a, b, atol=relative * b.abs().max().item(), rtol=0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process(dtype, temperature, entropy_grad, softcap):
    check(0, 1, None, dtype, temperature=temperature, entropy_grad=entropy_grad, softcap=softcap)


@pytest.mark.parametrize("chunk_size", [1, 3, 7])
def test_chunks_change_nothing_but_rounding(chunk_size):
    options = dict(temperature=0.7, entropy_grad=True, softcap=5.0)
    whole = computed(0, 1, None, make_case(), **options, chunk_size=1000)
    for a, b in zip(computed(0, 1, None, make_case(), **options, chunk_size=chunk_size), whole, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32():
    """A thousand tokens of gradient 1/2 in chunks of one: bfloat16 would stop counting at 128."""
    hidden_NH = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight_VH = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    target_N = torch.zeros(1000, dtype=torch.int64)
    log_probs_and_entropy(hidden_NH, weight_VH, target_N, 1.0, chunk_size=1)[0].sum().backward()
    assert weight_VH.grad[:, 0].tolist() == [500, -500]


def main(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for dtype in (torch.float32, torch.bfloat16):
        for options in (dict(entropy_grad=False), dict(entropy_grad=True, softcap=4.0)):
            # Of 21 rows padded to 32, rank 1 of 2 holds 5; of 4 ranks, the last holds padding only.
            check(rank, size, dist.group.WORLD, dtype, temperature=0.7, **options)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_over_gloo(size, run_ranks):
    run_ranks(__file__, size)


@pytest.mark.parametrize("chunk_size", [128, 2048])
def test_memory_is_that_of_a_chunk(chunk_size):
    """Whole, the logits of this case are 134 MB; a chunk of 128 tokens has 8.4."""
    hidden_NH = torch.randn(2048, 16, requires_grad=True)
    weight_VH = torch.randn(16384, 16, requires_grad=True)
    target_N = torch.zeros(2048, dtype=torch.int64)
    with LiveBytes() as live:  # a process's own peak has noise
        log_probs_and_entropy(hidden_NH, weight_VH, target_N, 1.0, chunk_size=chunk_size)[0].sum().backward()
    logits = chunk_size * 16384 * 4
    assert 2 * logits < live.peak < 5 * logits


def test_no_tokens():
    hidden_NH, weight_VH = torch.randn(0, 3, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    target_N = torch.zeros(0, dtype=torch.int64)
    log_probs_N, entropy_N = log_probs_and_entropy(hidden_NH, weight_VH, target_N, 1.0, entropy_grad=True)
    (log_probs_N.sum() + entropy_N.sum()).backward()
    assert hidden_NH.grad.shape == (0, 3) and weight_VH.grad.eq(0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_refuses_a_temperature_of_zero(temperature):
    with pytest.raises(ValueError, match="rollout-temperature"):
        log_probs_and_entropy(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64), temperature)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
