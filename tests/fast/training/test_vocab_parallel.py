import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles.training import vocab_parallel
from miles.training.vocab_parallel import log_probs_and_entropy

ROWS, VOCAB, PADDED = 7, 21, 32


def make_case(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits_NV = (torch.randn(ROWS, PADDED, generator=generator) * 5).to(dtype)
    target_N = torch.tensor([0, 20, 15, 16, 7, 3, 19])
    weights = torch.randn(2, ROWS, generator=generator)
    return logits_NV, target_N, weights


def expected(logits_NV, target_N, weights, temperature, entropy_grad):
    """Plain log_softmax in float64: log-probabilities, entropy, and the gradient of their weighted sum."""
    leaf_NV = logits_NV.double().requires_grad_()
    log_p_NV = torch.log_softmax(leaf_NV[:, :VOCAB] / temperature, dim=1)
    log_probs_N = log_p_NV.gather(1, target_N[:, None])[:, 0]
    entropy_N = -(log_p_NV.exp() * log_p_NV).sum(dim=1)
    loss = (log_probs_N * weights[0]).sum() + ((entropy_N * weights[1]).sum() if entropy_grad else 0)
    loss.backward()
    return log_probs_N.detach().float(), entropy_N.detach().float(), leaf_NV.grad.float()


def check(rank, size, group, dtype, temperature, entropy_grad):
    logits_NV, target_N, weights = make_case(dtype)
    columns = slice(rank * PADDED // size, (rank + 1) * PADDED // size)
    leaf_NV = logits_NV[:, columns].clone().requires_grad_()
    log_probs_N, entropy_N = log_probs_and_entropy(leaf_NV, target_N, temperature, group, entropy_grad, VOCAB)
    loss = (log_probs_N * weights[0]).sum() + ((entropy_N * weights[1]).sum() if entropy_grad else 0)
    assert entropy_N.requires_grad == entropy_grad
    loss.backward()
    want = expected(logits_NV, target_N, weights, temperature, entropy_grad)
    assert log_probs_N.dtype == entropy_N.dtype == torch.float32 and leaf_NV.grad.dtype == dtype
    torch.testing.assert_close(log_probs_N.detach(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N.detach(), want[1], atol=1e-5, rtol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(leaf_NV.grad.float(), want[2][:, columns], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(leaf_NV.detach(), logits_NV[:, columns], atol=0, rtol=0)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process(dtype, temperature, entropy_grad):
    check(0, 1, None, dtype, temperature, entropy_grad)


def test_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(vocab_parallel, "BLOCK_LOGITS", 2 * PADDED)
    check(0, 1, None, torch.float32, 0.7, True)


def run_rank(rank, size, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    for dtype in (torch.float32, torch.bfloat16):
        for entropy_grad in (False, True):
            # Of 21 columns padded to 32, rank 1 of 2 holds 5; of 4 ranks, the last holds padding only.
            check(rank, size, dist.group.WORLD, dtype, 0.7, entropy_grad)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_over_gloo(size, tmp_path):
    mp.spawn(run_rank, args=(size, tmp_path / "rendezvous"), nprocs=size)


def test_no_rows():
    logits_NV = torch.randn(0, 8, requires_grad=True)
    log_probs_N, entropy_N = log_probs_and_entropy(logits_NV, torch.zeros(0, dtype=torch.int64), 1.0, entropy_grad=True)
    (log_probs_N.sum() + entropy_N.sum()).backward()
    assert logits_NV.grad.shape == (0, 8)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_refuses_a_temperature_of_zero(temperature):
    with pytest.raises(ValueError, match="rollout-temperature"):
        log_probs_and_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature)
