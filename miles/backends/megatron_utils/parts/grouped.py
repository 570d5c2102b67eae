"""One product for all experts of a rank: rows in the order of their experts, each group times its expert's weight.

On a GPU in bf16 it is one kernel (torch's grouped_mm), and nothing waits for the counts: they stay on the device.
Elsewhere it is a loop over the experts, in the order and with the operands of Megatron's linear layers.

Shape letters: E experts of this rank, T rows, I inputs, O outputs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

# What the kernel reads at a time: 16 bytes of a row.
ALIGNMENT = 8


@dataclass(frozen=True, eq=False)
class Groups:
    """How many rows each expert has.

    Args:
        counts_E: int64, on the device of the rows. They add up to the number of rows.
        rows: that number.
    """

    counts_E: torch.Tensor
    rows: int

    @cached_property
    def ends_E(self) -> torch.Tensor:
        """int32: where each group ends."""
        return self.counts_E.cumsum(0).to(torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The counts as numbers. On a GPU this waits for the device."""
        return self.counts_E.tolist()

    @cached_property
    def expert_T(self) -> torch.Tensor:
        """int64: the expert of each row."""
        numbers_E = torch.arange(len(self.counts_E), device=self.counts_E.device)
        return numbers_E.repeat_interleave(self.counts_E, output_size=self.rows)


def grouped_linear(x_TI: torch.Tensor, weight_EOI: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[T, O]: each row times the transposed weight of its expert."""
    return _GroupedLinear.apply(x_TI, weight_EOI, groups)


def grouped_bias(bias_EO: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[T, O]: for each row the bias of its expert."""
    return _GroupedBias.apply(bias_EO, groups)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, weight_EOI: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.save_for_backward(x_TI, weight_EOI)
        ctx.groups, ctx.weight = groups, weight_EOI
        return _rows_by_matrices(x_TI, weight_EOI.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_TI, weight_EOI = ctx.saved_tensors
        grad_TO = grads[0].contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_TI = _rows_by_matrices(grad_TO, weight_EOI, ctx.groups) if needs_x else None
        if not needs_weight:
            return grad_TI, None, None
        return grad_TI, _added(ctx.weight, _rows_by_rows(grad_TO, x_TI.contiguous(), ctx.groups)), None


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias_EO: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.groups = groups
        return bias_EO.index_select(0, groups.expert_T)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad_TO = grads[0].contiguous()
        if _is_grouped(grad_TO):
            # A sum over rows is a product with ones; adding row by row would be thousands of atomic additions to one.
            ones_TI = grad_TO.new_ones(len(grad_TO), ALIGNMENT)
            return _rows_by_rows(grad_TO, ones_TI, ctx.groups)[..., 0].contiguous(), None
        return torch.stack([part.sum(0) for part in grad_TO.split(ctx.groups.sizes)]), None


def _added(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Adds a gradient to what Megatron adds up over a step, and returns it.

    It would add it itself, to the zeros of the step's start too: the first one is copied, which reads 4 bytes a number
    less. Its flag, which it takes back with the zeros, says whether there was one.
    """
    total = getattr(weight, "main_grad", None)
    if total is not None:
        if getattr(weight, "grad_added_to_main_grad"):  # noqa: B009
            total.add_(grad)
        else:
            total.copy_(grad)
            setattr(weight, "grad_added_to_main_grad", True)  # noqa: B010
    return grad


def _is_grouped(*tensors: torch.Tensor) -> bool:
    """Whether the kernel takes tensors of these types and widths."""
    return all(
        tensor.is_cuda and tensor.dtype == torch.bfloat16 and tensor.shape[-1] % ALIGNMENT == 0 for tensor in tensors
    )


def _rows_by_matrices(rows_TA: torch.Tensor, matrices_EAB: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[T, B]: the rows of each group times its matrix, which may be transposed in memory."""
    if not len(rows_TA):
        return rows_TA.new_empty(0, matrices_EAB.shape[2])
    if _is_grouped(rows_TA, matrices_EAB):
        return torch._grouped_mm(rows_TA, matrices_EAB, offs=groups.ends_E)
    result_TB = rows_TA.new_empty(len(rows_TA), matrices_EAB.shape[2])
    for number, (rows, result) in enumerate(
        zip(rows_TA.split(groups.sizes), result_TB.split(groups.sizes), strict=True)
    ):
        if len(rows):
            torch.mm(rows, matrices_EAB[number], out=result)
    return result_TB


def _rows_by_rows(left_TA: torch.Tensor, right_TB: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[E, A, B]: the sum over each group's rows of their outer products; zeros where a group has none."""
    if len(left_TA) and _is_grouped(left_TA, right_TB):
        return torch._grouped_mm(left_TA.t(), right_TB, offs=groups.ends_E)
    result_EAB = left_TA.new_zeros(len(groups.counts_E), left_TA.shape[1], right_TB.shape[1])
    for number, (left, right) in enumerate(zip(left_TA.split(groups.sizes), right_TB.split(groups.sizes), strict=True)):
        if len(left):
            torch.mm(left.t(), right, out=result_EAB[number])
    return result_EAB
