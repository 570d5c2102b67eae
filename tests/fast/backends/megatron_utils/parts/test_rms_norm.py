"""The norm of a GPU, computed step by step on a CPU, against torch's."""

import pytest
import torch
import torch.nn.functional as F

from miles.backends.megatron_utils.parts import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 1, 48), (5, 1, 3, 16), (1, 1, 8)])
def test_forward_and_backward(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(*shape, 2, generator=generator).to(dtype)[..., 0] for _ in range(2))
    weight_D = torch.randn(shape[-1], generator=generator).to(dtype)

    def run(function, dtype):
        x_, weight_D_ = (t.detach().to(dtype).requires_grad_() for t in (x, weight_D))
        y = function(x_, weight_D_)
        y.backward(grad.to(dtype))
        return y.detach(), x_.grad, weight_D_.grad

    got = run(lambda x, weight_D: rms_norm._RMSNorm.apply(x, weight_D, 0.1), dtype)
    expected = run(lambda x, weight_D: F.rms_norm(x, weight_D.shape, weight_D, 0.1), torch.float64)
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        torch.testing.assert_close(a.double(), b, atol=tolerance * b.abs().max().item(), rtol=0)
