"""Log-probabilities and entropy of response tokens from their hidden states, a chunk of tokens at a time.

Shapes: N response tokens, C of them in a chunk, H hidden size, V the output weight's rows on this rank of a
tensor-parallel group (its part of the vocabulary, padding left out).
"""

import torch
import torch.distributed as dist

from miles.utils.errors import UserError
from miles.utils.fused import fused

CHUNK_SIZE = 2048  # tokens; the default of --log-probs-chunk-size


def log_probs_and_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
    vocab_size: int | None = None,
    softcap: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `target_N` and entropy of each token's distribution softmax(logits / temperature), in float32.

    Logits are `hidden_NH @ weight_VH.T`, accumulated and kept in float32: rounded to bfloat16 they are off by a few
    hundredths, most of the gap between a trainer's and an engine's log-probabilities. They exist for one chunk at a
    time, in the backward pass too, which computes them again; the weight's gradient is summed up in float32.

    Args:
        hidden_NH: any float type.
        weight_VH: rank r of `group` holds the rows r * V .. (r + 1) * V - 1 of the vocabulary.
        target_N: int64 ids in the whole vocabulary.
        temperature: what the engine divided by, above 0.
        group: the tensor-parallel group; None, or a group of one, needs no communication. The gradient of `hidden_NH`
            is this rank's part, to be summed over the group.
        entropy_grad: let gradients flow through the entropy.
        vocab_size: true size of the vocabulary; rows from there on are padding and have probability 0.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature (Gemma 2); None: they don't.
        chunk_size: tokens a chunk.

    Raises:
        ValueError: the temperature isn't above 0.
    """
    if not temperature > 0:
        raise UserError(
            f"temperature is {temperature}; log-probabilities need one above 0: set --rollout-temperature to what "
            "samples should be drawn with (1.0 by default)"
        )
    if group is not None and group.size() == 1:
        group = None
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    width = len(weight_VH)
    # How many of this rank's rows are real.
    real = min(max((size * width if vocab_size is None else vocab_size) - rank * width, 0), width)
    column_N = target_N - rank * width
    local_N = (column_N >= 0) & (column_N < real)
    column_N = torch.where(local_N, column_N, 0)
    return _LogProbsAndEntropy.apply(
        hidden_NH, weight_VH, real, column_N, local_N, (temperature, softcap), group, entropy_grad, chunk_size
    )


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, real, column_N, local_N, scaling, group, entropy_grad, chunk_size):
        ctx.real, ctx.scaling, ctx.entropy_grad, ctx.chunk_size = real, scaling, entropy_grad, chunk_size
        sums_4N = torch.zeros((4, len(column_N)), dtype=torch.float32, device=hidden_NH.device)
        # A rank with nothing but padding has a maximum that is finite and below any other.
        sums_4N[0] = -1e30
        for chunk in _chunks(ctx, len(column_N)):
            logits_CV = _product(hidden_NH[chunk], weight_VH[:real].t())
            sums_4N[:, chunk] = fused(_sums, logits_CV)(logits_CV, column_N[chunk, None], scaling)
            del logits_CV
        max_N, chosen_N, sum_N, dot_N = sums_4N

        # What is relative to this rank's maximum becomes relative to the group's.
        top_N = max_N.clone()
        if group is not None:
            dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
        shift_N = max_N - top_N
        scale_N = shift_N.exp()
        chosen_N = torch.where(local_N, chosen_N + shift_N, 0.0)
        sums_3N = torch.stack((chosen_N, sum_N * scale_N, (dot_N + shift_N * sum_N) * scale_N))
        if group is not None:
            dist.all_reduce(sums_3N, group=group)
        chosen_N, sum_N, dot_N = sums_3N

        log_sum_N = sum_N.log()
        log_probs_N = chosen_N - log_sum_N
        entropy_N = log_sum_N - dot_N / sum_N
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        kept_N = entropy_N if entropy_grad else None
        ctx.save_for_backward(hidden_NH, weight_VH, column_N, local_N, top_N, log_sum_N, kept_N)
        return log_probs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_log_probs_N, grad_entropy_N):
        hidden_NH, weight_VH, column_N, local_N, top_N, log_sum_N, entropy_N = ctx.saved_tensors
        real_VH = weight_VH[: ctx.real]
        grad_hidden_NH = torch.zeros_like(hidden_NH)
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        per_token = [top_N, log_sum_N, grad_log_probs_N]
        if ctx.entropy_grad:
            per_token += [entropy_N, grad_entropy_N]
        for chunk in _chunks(ctx, len(column_N)):
            columns = [values_N[chunk, None] for values_N in per_token]
            column_C1, local_C1 = column_N[chunk, None], local_N[chunk, None]
            logits_CV = _product(hidden_NH[chunk], real_VH.t())
            # First everywhere as if the target were elsewhere, then right where it is.
            grad_CV = fused(_gradient, logits_CV)(logits_CV, None, ctx.scaling, hidden_NH.dtype, *columns)
            target_C1 = _gradient(logits_CV.gather(1, column_C1), local_C1, ctx.scaling, hidden_NH.dtype, *columns)
            del logits_CV
            grad_CV.scatter_(1, column_C1, target_C1)
            grad_hidden_NH[chunk] = _product(grad_CV, real_VH)
            _add_product(grad_weight_VH[: ctx.real], grad_CV.t(), hidden_NH[chunk])
            del grad_CV
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None, None, None


def _chunks(ctx, num_tokens: int) -> list[slice]:
    """None for a rank with nothing but padding."""
    starts = range(0, num_tokens if ctx.real else 0, ctx.chunk_size)
    return [slice(start, start + ctx.chunk_size) for start in starts]


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, accumulated and returned in float32 whatever the inputs' type."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _scaled(logits_CV: torch.Tensor, scaling: tuple[float, float | None]) -> torch.Tensor:
    """A new tensor: what the softmax is taken of."""
    temperature, softcap = scaling
    if softcap is None:
        return logits_CV / temperature
    return (logits_CV / softcap).tanh_().mul_(softcap / temperature)


def _sums(logits_CV: torch.Tensor, column_C1: torch.Tensor, scaling: tuple[float, float | None]) -> torch.Tensor:
    """[4, C]: with z the scaled logits, m = max z and x = z - m: m, x at the column, sum of e^x, sum of x e^x."""
    z_CV = _scaled(logits_CV, scaling)
    max_C1 = z_CV.amax(dim=1, keepdim=True)
    x_CV = z_CV.sub_(max_C1)
    exp_CV = x_CV.exp()
    sum_C = exp_CV.sum(dim=1)
    return torch.stack((max_C1[:, 0], x_CV.gather(1, column_C1)[:, 0], sum_C, exp_CV.mul_(x_CV).sum(dim=1)))


def _gradient(
    logits_CV: torch.Tensor,
    hit_CV: torch.Tensor | None,
    scaling: tuple[float, float | None],
    dtype: torch.dtype,
    top_C1: torch.Tensor,
    log_sum_C1: torch.Tensor,
    grad_log_probs_C1: torch.Tensor,
    entropy_C1: torch.Tensor | None = None,
    grad_entropy_C1: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss's gradient by the logits, with `hit_CV` true where the column is the target (None: nowhere).

    With z the scaled logits, t the target, p = softmax(z): d log p_t / d z_j = [j = t] - p_j, and
    d H / d z_j = -p_j (log p_j + H).
    """
    temperature, softcap = scaling
    log_p_CV = _scaled(logits_CV, scaling).sub_(top_C1).sub_(log_sum_C1)
    p_CV = log_p_CV.exp()
    if entropy_C1 is None or grad_entropy_C1 is None:
        grad_CV = p_CV.mul_(-grad_log_probs_C1)
    else:
        grad_CV = log_p_CV.add_(entropy_C1).mul_(grad_entropy_C1).add_(grad_log_probs_C1).mul_(p_CV).neg_()
    if hit_CV is not None:
        grad_CV = grad_CV + torch.where(hit_CV, grad_log_probs_C1, 0.0)
    grad_CV = grad_CV.div_(temperature)
    if softcap is not None:
        grad_CV = grad_CV * (1 - (logits_CV / softcap).tanh_().square_())
    return grad_CV.to(dtype)
