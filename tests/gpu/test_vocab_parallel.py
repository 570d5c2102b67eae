"""Log-probabilities, entropy and their gradients on a GPU: compiled, bf16 products with float32 results."""

import pytest
import torch

from miles.training.vocab_parallel import log_probs_and_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS, HIDDEN, VOCAB, PADDED = 70, 64, 1000, 1024


def result(hidden_NH, weight_VH, target_N, weights, softcap, dtype, device, chunk_size):
    hidden_NH = hidden_NH.to(device, dtype).requires_grad_()
    weight_VH = weight_VH.to(device, dtype).requires_grad_()
    log_probs_N, entropy_N = log_probs_and_entropy(
        hidden_NH, weight_VH, target_N.to(device), 0.7, None, True, VOCAB, softcap, chunk_size
    )
    weights = weights.to(device)
    (log_probs_N * weights[0] + entropy_N * weights[1]).sum().backward()
    return [x.detach().float().cpu() for x in (log_probs_N, entropy_N, hidden_NH.grad, weight_VH.grad)]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk_size", [32, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_on_a_cpu(dtype, chunk_size, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weight_VH = (torch.randn(PADDED, HIDDEN, generator=generator) * 0.5).bfloat16()
    target_N = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weights = torch.randn(2, TOKENS, generator=generator)
    case = (hidden_NH, weight_VH, target_N, weights, softcap)
    expected = result(*case, torch.float32, "cpu", 1000)
    got = result(*case, dtype, "cuda", chunk_size)
    # The softmax is in float32 either way; in bfloat16 the gradients by the logits and by the inputs are rounded.
    for a, b, relative in zip(
        got, expected, [1e-5, 1e-5, *[2e-2 if dtype == torch.bfloat16 else 1e-4] * 2], strict=True
    ):
        torch.testing.assert_close(a, b, atol=relative * b.abs().max().item(), rtol=0)


def test_memory_is_that_of_a_chunk():
    """16,384 tokens of a vocabulary of 65,536: whole, the logits are 4.3 GB; a chunk of 1,024 tokens has 268 MB."""
    hidden_NH = torch.randn(16384, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight_VH = torch.randn(65536, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target_N = torch.zeros(16384, dtype=torch.int64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs_and_entropy(hidden_NH, weight_VH, target_N, 1.0, chunk_size=1024)[0].sum().backward()
    gradients = 65536 * 256 * (4 + 2) + 16384 * 256 * 2
    assert torch.cuda.max_memory_allocated() - before < gradients + 2.5 * 1024 * 65536 * 4
