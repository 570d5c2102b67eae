"""Log-probabilities and entropy from logits whose vocabulary is spread over a tensor-parallel group.

Shapes: N rows (response tokens), V the columns of this rank.
"""

import torch
import torch.distributed as dist

# Rows are taken in blocks of about this many logits, so that the float32 temporaries stay near 128 MiB each.
BLOCK_LOGITS = 1 << 25


def log_probs_and_entropy(
    logits_NV: torch.Tensor,
    target_N: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `target_N` and entropy of each row's distribution softmax(logits / temperature), in float32.

    The backward pass recomputes the softmax from the logits: besides them, only a few numbers a row are kept.

    Args:
        logits_NV: any float dtype; rank r of `group` holds the columns r * V .. (r + 1) * V - 1 of the vocabulary.
        target_N: int64 ids in the whole vocabulary.
        temperature: what the engine divided by, above 0.
        group: the tensor-parallel group; None, or a group of one, needs no communication.
        entropy_grad: let gradients flow through the entropy.
        vocab_size: true size of the vocabulary; columns from there on are padding and have probability 0.

    Raises:
        ValueError: the temperature isn't above 0.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; log-probabilities need one above 0: set --rollout-temperature to what "
            "samples should be drawn with (1.0 by default)"
        )
    if group is not None and group.size() == 1:
        group = None
    return _LogProbsAndEntropy.apply(logits_NV, target_N, temperature, group, entropy_grad, vocab_size)


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV, target_N, temperature, group, entropy_grad, vocab_size):
        num_rows, width = logits_NV.shape
        first = 0 if group is None else group.rank() * width
        # How many of this rank's columns are real.
        ctx.real = width if vocab_size is None else min(max(vocab_size - first, 0), width)
        ctx.temperature, ctx.entropy_grad = temperature, entropy_grad

        max_N = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=logits_NV.device)
        if ctx.real:
            max_N = logits_NV[:, : ctx.real].amax(dim=1).float() / temperature
        if group is not None:
            dist.all_reduce(max_N, op=dist.ReduceOp.MAX, group=group)

        column_N = target_N - first
        local_N = (column_N >= 0) & (column_N < ctx.real)
        column_N = torch.where(local_N, column_N, 0)
        target_logit_N, sum_N, dot_N = sums = torch.zeros((3, num_rows), dtype=torch.float32, device=logits_NV.device)
        for block in _blocks(num_rows, width):
            x_BV = _shifted(logits_NV[block], max_N[block], ctx)
            chosen_B = x_BV.gather(1, column_N[block, None])[:, 0]
            target_logit_N[block] = torch.where(local_N[block], chosen_B, 0.0)
            exp_BV = x_BV.exp()
            sum_N[block] = exp_BV.sum(dim=1)
            dot_N[block] = x_BV.mul_(exp_BV).sum(dim=1)
        if group is not None:
            dist.all_reduce(sums, group=group)

        log_sum_N = sum_N.log()
        log_probs_N = target_logit_N - log_sum_N
        entropy_N = log_sum_N - dot_N / sum_N
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(logits_NV, column_N, local_N, max_N, log_sum_N, entropy_N if entropy_grad else None)
        return log_probs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_log_probs_N, grad_entropy_N):
        """With z = logits / temperature: d log p_t / d z_j = [j = t] - p_j; d H / d z_j = -p_j (log p_j + H)."""
        logits_NV, column_N, local_N, max_N, log_sum_N, entropy_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        chosen_N = torch.where(local_N, grad_log_probs_N, 0.0)[:, None]
        for block in _blocks(*logits_NV.shape):
            log_p_BV = _shifted(logits_NV[block], max_N[block], ctx).sub_(log_sum_N[block, None])
            p_BV = log_p_BV.exp()
            if ctx.entropy_grad:
                # p * -(g_log_prob + g_entropy * (log p + H))
                factor_BV = log_p_BV.add_(entropy_N[block, None]).mul_(grad_entropy_N[block, None])
                grad_BV = factor_BV.add_(grad_log_probs_N[block, None]).mul_(p_BV).neg_()
            else:
                grad_BV = p_BV.mul_(-grad_log_probs_N[block, None])
            grad_BV.scatter_add_(1, column_N[block, None], chosen_N[block])
            grad_NV[block] = grad_BV.div_(ctx.temperature)
        return grad_NV, None, None, None, None, None


def _blocks(num_rows: int, width: int) -> list[slice]:
    size = max(1, BLOCK_LOGITS // width)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _shifted(logits_BV: torch.Tensor, max_B: torch.Tensor, ctx) -> torch.Tensor:
    """A new float32 tensor, logits / temperature - max; padding columns get a finite value whose exp is 0."""
    x_BV = logits_BV.to(torch.float32, copy=True).div_(ctx.temperature).sub_(max_B[:, None])
    x_BV[:, ctx.real :] = -1e4
    return x_BV
