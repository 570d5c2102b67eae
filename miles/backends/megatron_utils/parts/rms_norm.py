"""Root mean square normalisation (Zhang & Sennrich 2019, eq. 4): torch's on a CPU, compiled kernels on a GPU.

torch's own GPU kernels take four times as long, most of it for the short rows of query and key norms. Shapes: R rows of
D values.
"""

import torch
import torch.nn.functional as F

from miles.utils.fused import fused


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean of x^2 over the last dimension + eps) * weight, computed in float32, in the type of x."""
    # Where a caller is compiled (Megatron's gated delta net), torch's own becomes part of the caller's kernels.
    if x.is_cuda and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight_D, eps)
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return fused(_normalised, x)(_rows(x), weight_D, eps).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight_D = ctx.saved_tensors
        grad_RD, grad_D = fused(_gradients, x)(_rows(grad), _rows(x), weight_D, ctx.eps)
        return grad_RD.view(x.shape), grad_D, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    x_RD = x.reshape(-1, x.shape[-1])
    # One kernel for each D, whatever the number of rows.
    torch._dynamo.maybe_mark_dynamic(x_RD, 0)
    torch._dynamo.mark_static(x_RD, 1)
    return x_RD


def _normalised(x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    y_RD = x_RD.float()
    y_RD = y_RD * torch.rsqrt(y_RD.square().mean(dim=1, keepdim=True) + eps)
    return (y_RD * weight_D.float()).to(x_RD.dtype)


def _gradients(
    grad_RD: torch.Tensor, x_RD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """With u = x / rms and h = grad * weight: d x = (h - u * mean(h * u)) / rms, d weight = sum of grad * u."""
    x_RD32, grad_RD32 = x_RD.float(), grad_RD.float()
    inverse_R1 = torch.rsqrt(x_RD32.square().mean(dim=1, keepdim=True) + eps)
    unit_RD, scaled_RD = x_RD32 * inverse_R1, grad_RD32 * weight_D.float()
    grad_x_RD = (scaled_RD - unit_RD * (scaled_RD * unit_RD).mean(dim=1, keepdim=True)) * inverse_R1
    return grad_x_RD.to(x_RD.dtype), (grad_RD32 * unit_RD).sum(dim=0).to(weight_D.dtype)
