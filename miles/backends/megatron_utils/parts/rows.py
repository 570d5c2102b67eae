"""Rows on their way to experts and back: sorted by expert, and summed again over the experts of a token.

A token has the same number of experts as every other, so both ways are gathers: no two threads add to one row, results
do not depend on their order, and nothing waits for counts.

Shape letters: T tokens, E experts, K experts of a token, N = T * K rows, H channels.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class RowOrder:
    """An order of rows.

    Args:
        token_N: the token of each row.
        place_TK: the rows of each token, ascending.
        entry_N: for an order by experts, the place of each row's probability in [E, T], flat.
    """

    token_N: torch.Tensor
    place_TK: torch.Tensor
    entry_N: torch.Tensor | None = None

    @classmethod
    def by_expert(cls, chosen_TE: torch.Tensor, topk: int) -> "RowOrder":
        """Rows by expert, those of one expert by token. chosen_TE: which experts each token has, `topk` of them."""
        tokens = len(chosen_TE)
        entry_N = chosen_TE.t().reshape(-1).argsort(descending=True, stable=True)[: tokens * topk]
        token_N = entry_N % tokens if tokens else entry_N
        return cls(token_N, token_N.argsort(stable=True).view(tokens, topk), entry_N)

    @classmethod
    def by_key(cls, key_N: torch.Tensor) -> "RowOrder":
        """Rows by an ascending key, those of the same key in the order they have."""
        order_N = key_N.argsort(stable=True)
        return cls(order_N, order_N.argsort(stable=True)[:, None])

    def to_rows(self, tokens_TH: torch.Tensor) -> torch.Tensor:
        """[N, H]: the token of each row."""
        return _ToRows.apply(tokens_TH, self)

    def to_tokens(self, rows_NH: torch.Tensor) -> torch.Tensor:
        """[T, H]: the sum of each token's rows."""
        return _ToTokens.apply(rows_NH, self)

    def probs(self, probs_TE: torch.Tensor) -> torch.Tensor:
        """[N]: the probability of each row."""
        assert self.entry_N is not None
        return probs_TE.t().reshape(-1).gather(0, self.entry_N)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return tokens_TH.index_select(0, order.token_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grads[0], ctx.order), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return _sum(rows_NH, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.order.token_N), None


def _sum(rows_NH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    if order.place_TK.shape[1] == 1 or not rows_NH.is_cuda or not len(rows_NH):
        return _sum_of_gathered(rows_NH, order.place_TK)
    torch._dynamo.maybe_mark_dynamic(rows_NH, 0)
    torch._dynamo.maybe_mark_dynamic(order.place_TK, 0)
    return _compiled_sum()(rows_NH, order.place_TK)


def _sum_of_gathered(rows_NH: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    """Half precision is added up in float32."""
    wide = torch.promote_types(rows_NH.dtype, torch.float32)
    total_TH = rows_NH[place_TK[:, 0]].to(wide)
    for column in range(1, place_TK.shape[1]):
        total_TH = total_TH + rows_NH[place_TK[:, column]]
    return total_TH.to(rows_NH.dtype)


@functools.cache
def _compiled_sum() -> Callable:
    """One kernel that reads every row once."""
    return torch.compile(_sum_of_gathered, fullgraph=True)
