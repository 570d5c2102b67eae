"""RMSNorm's compiled kernels against torch's own, at the shapes of hidden states, queries and strided keys."""

import pytest
import torch
import torch.nn.functional as F

from miles.backends.megatron_utils.parts.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1000, 1, 2560), (1000, 1, 32, 128), (3000, 1, 8, 128), (1, 1, 64)])
def test_forward_and_backward(shape, dtype):
    # Every other head: rows with gaps between them, as keys have them.
    x, grad = (torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device="cuda")[..., : shape[-1]] for _ in range(2))
    weight_D = torch.randn(shape[-1], dtype=dtype, device="cuda")

    def run(function, dtype):
        x_, weight_D_ = (t.detach().to(dtype).requires_grad_() for t in (x, weight_D))
        y = function(x_, weight_D_)
        y.backward(grad.to(dtype))
        return y.detach(), x_.grad, weight_D_.grad

    got = run(lambda x, weight_D: rms_norm(x, weight_D, 1e-6), dtype)
    expected = run(lambda x, weight_D: F.rms_norm(x, weight_D.shape, weight_D, 1e-6), torch.float64)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=tolerance * b.abs().max().item(), rtol=0)
