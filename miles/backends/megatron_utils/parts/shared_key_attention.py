"""Attention whose one key serves all heads and is its own value, with a sink (DeepSeek-V4).

Shapes: T queries of this rank, N its heads, D their size, A keys (tokens, then compressed entries), J picked entries of
a query, Q queries of a block, B keys of a block.

Blocks of queries are computed one after another, and going back remakes their scores. Since all heads share the keys,
a block is one matrix product with all keys that its queries see together, and who sees what is a mask. Where that would
be many more keys than each query picks, every query has its own picked keys gathered instead. So memory grows with
T * J and never with the square of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from miles.backends.megatron_utils.parts.dsa import product
from miles.backends.megatron_utils.parts.windows import Spans

# Queries. With 64 heads a GPU is busy with them, and the host has time to start what follows.
BLOCK = 512
# The keys of a block are a multiple of this: matrix products of odd sizes take several times as long.
ALIGNED = 64
# Picked entries are gathered for each query where its block sees this many times more: gathering copies every key, and
# its products are small ones, so that a gathered key costs as much as a few that are masked.
GATHERED_FROM = 4


@dataclass(frozen=True, eq=False)
class Visible:
    """The keys that each query sees.

    Args:
        tokens: of the `token_count` keys that are tokens.
        token_count: where entries begin among the keys.
        entries: counted from the first entry; None where there are none.
        picked_TJ: int32, the entries that each query sees of those, -1 where it has fewer; None: all.
    """

    tokens: Spans
    token_count: int
    entries: Spans | None = None
    picked_TJ: torch.Tensor | None = None

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Queries; their keys, int64 [B] for all or [Q, B] for each; bool [Q, B], who sees what."""
        for block, low, high in self.tokens.blocks(BLOCK):
            start, end = (0, 0) if self.entries is None else self.entries.of(block)
            if self.picked_TJ is not None and end - start > GATHERED_FROM * self.picked_TJ.shape[1]:
                yield block, *_aligned(*self._own_keys(block, self.picked_TJ[block].long()))
            else:
                yield block, *_aligned(*self._shared_keys(block, low, high, start, end))

    def _shared_keys(
        self, block: slice, low: int, high: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.tokens.low_T.device
        index_B, mask_QB = torch.arange(low, high, device=device), self.tokens.mask(block, low, high)
        if self.entries is None:
            return index_B, mask_QB
        index_B = torch.cat((index_B, torch.arange(start, end, device=device) + self.token_count))
        if self.picked_TJ is None:
            mask_QW = self.entries.mask(block, start, end)
        else:
            # A column more than there are entries takes what is not picked.
            picked_QJ = self.picked_TJ[block].long()
            place_QJ = torch.where(picked_QJ < 0, end, picked_QJ) - start
            mask_QW = torch.zeros(len(mask_QB), end - start + 1, dtype=torch.bool, device=device)
            mask_QW = mask_QW.scatter_(1, place_QJ, True)[:, :-1]
        return index_B, torch.cat((mask_QB, mask_QW), dim=1)

    def _own_keys(self, block: slice, picked_QJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.tokens.part(block)
        token_QK = tokens.low_T[:, None] + torch.arange(tokens.longest, device=picked_QJ.device)
        seen_QK = token_QK < tokens.high_T[:, None]
        # What is not seen must only be there.
        token_QK = torch.where(seen_QK, token_QK, 0)
        entry_QJ = picked_QJ.clamp(min=0) + self.token_count
        return torch.cat((token_QK, entry_QJ), dim=1), torch.cat((seen_QK, picked_QJ >= 0), dim=1)


def _aligned(index: torch.Tensor, mask_QB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With key 0, which nobody sees, as often as it takes."""
    missing = -mask_QB.shape[1] % ALIGNED
    return F.pad(index, (0, missing)), F.pad(mask_QB, (0, missing))


def shared_key_attention(
    query_TND: torch.Tensor, key_AD: torch.Tensor, sink_N: torch.Tensor, visible: Visible, scale: float
) -> torch.Tensor:
    """[T, N, D]: softmax attention of each head to the keys that its query sees, which are the values too.

    Args:
        query_TND: rotated.
        key_AD: rotated.
        sink_N: float32; its exponential is added to a head's denominator.
        visible: who sees what.
        scale: of the scores.
    """
    return _Attention.apply(query_TND, key_AD, sink_N, visible, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_TND, key_AD, sink_N, visible, scale):
        ctx.save_for_backward(query_TND, key_AD, sink_N)
        ctx.visible, ctx.scale = visible, scale
        out_TND = torch.empty_like(query_TND)
        for block, index, mask_QB in visible.blocks():
            key = key_AD[index]
            weight_QNB, _ = _weights(query_TND[block], key, mask_QB, sink_N, scale)
            out_TND[block] = _times(weight_QNB.to(key.dtype), key)
        return out_TND

    @staticmethod
    def backward(ctx, grad_TND):
        query_TND, key_AD, sink_N = ctx.saved_tensors
        grad_query_TND, grad_sink_N = torch.empty_like(query_TND), torch.zeros_like(sink_N)
        grad_key_AD = torch.zeros_like(key_AD, dtype=torch.float32)
        for block, index, mask_QB in ctx.visible.blocks():
            key, query_QND, grad_QND = key_AD[index], query_TND[block], grad_TND[block]
            weight_QNB, sink_weight_QN = _weights(query_QND, key, mask_QB, sink_N, ctx.scale)
            # The derivative of a softmax; the sink's value is zero.
            grad_weight_QNB = _times(grad_QND, key.mT)
            inner_QN1 = (grad_weight_QNB * weight_QNB).sum(-1, keepdim=True)
            grad_sink_N -= (sink_weight_QN * inner_QN1[..., 0]).sum(0)
            grad_score_QNB = (weight_QNB * (grad_weight_QNB - inner_QN1) * ctx.scale).to(key.dtype)
            grad_query_TND[block] = _times(grad_score_QNB, key)
            # As a key and as a value.
            grad_key = _summed(grad_score_QNB, query_QND, key) + _summed(weight_QNB.to(key.dtype), grad_QND, key)
            grad_key_AD.index_add_(0, index.flatten(), grad_key.flatten(0, -2))
        return grad_query_TND, grad_key_AD.to(key_AD.dtype), grad_sink_N, None, None


def _weights(query_QND, key, mask_QB, sink_N, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [Q, N, B] and [Q, N]: the weight of each key, and of the sink."""
    scores_QNB = _times(query_QND, key.mT).mul_(scale).masked_fill_(~mask_QB[:, None], -torch.inf)
    largest_QN = torch.maximum(scores_QNB.amax(-1), sink_N)
    weight_QNB, sink_weight_QN = scores_QNB.sub_(largest_QN[..., None]).exp_(), (sink_N - largest_QN).exp()
    total_QN = weight_QNB.sum(-1) + sink_weight_QN
    return weight_QNB.div_(total_QN[..., None]), sink_weight_QN / total_QN


def _times(x_QNI: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float32 [Q, N, O]: the product with [I, O], or with each query's own [Q, I, O]."""
    if y.dim() == 3:
        return product(x_QNI, y)
    return product(x_QNI.flatten(0, 1)[None], y[None])[0].unflatten(0, x_QNI.shape[:2])


def _summed(x_QNB: torch.Tensor, y_QND: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """float32, in the shape of `key`: for each key the sum over heads, and queries where they share keys, of x * y."""
    if key.dim() == 3:
        return product(x_QNB.mT, y_QND)
    return product(x_QNB.flatten(0, 1).T[None], y_QND.flatten(0, 1)[None])[0]
