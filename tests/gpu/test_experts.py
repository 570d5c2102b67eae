"""Grouped products, activations and orders of rows on a GPU against loops in float64; nothing waits for the host."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu

from miles.backends.megatron_utils.parts.experts import activate
from miles.backends.megatron_utils.parts.grouped import Groups, grouped_bias, grouped_linear
from miles.backends.megatron_utils.parts.rows import RowOrder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

INPUTS, OUTPUTS = 256, 384
# Rows of each expert: uneven, without one at either end, all on one, none at all.
COUNTS = [(5, 700, 3, 9), (0, 200, 1, 0), (0, 0, 333, 0), (1, 1, 1, 1), (0, 0, 0, 0)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(got, expected, tolerance):
    assert got.shape == expected.shape and not got.isnan().any()
    scale = max(expected.abs().max().item() if expected.numel() else 0.0, 1e-6)
    torch.testing.assert_close(got.double(), expected, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", COUNTS)
def test_products(counts, dtype):
    rows, experts = sum(counts), len(counts)
    x, grad = (torch.randn(rows, size, device="cuda", dtype=dtype) for size in (INPUTS, OUTPUTS))
    weight = torch.randn(experts, OUTPUTS, INPUTS, device="cuda", dtype=dtype)
    bias = torch.randn(experts, OUTPUTS, device="cuda", dtype=dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    groups = Groups(torch.tensor(counts, device="cuda"), rows)
    y = grouped_linear(leaves[0], leaves[1], groups) + grouped_bias(leaves[2], groups)
    y.backward(grad)

    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    parts = wide[0].split(counts)
    expected = torch.cat([part @ wide[1][e].t() + wide[2][e] for e, part in enumerate(parts)])
    expected.backward(grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    close(y, expected, tolerance)
    for own, leaf in zip(leaves, wide, strict=True):
        close(own.grad, leaf.grad, tolerance)


@pytest.mark.parametrize("fields", [(F.silu, None, 0.0), (F.silu, 1.0, 0.0), (quick_gelu, 1.0, 1.0)])
@pytest.mark.parametrize("rows", [1000, 1, 17, 0])
def test_activation(fields, rows):
    both, probs = torch.randn(rows, 2 * OUTPUTS, device="cuda", dtype=torch.bfloat16), torch.rand(rows, device="cuda")
    grad = torch.randn(rows, OUTPUTS, device="cuda", dtype=torch.bfloat16)

    def run(both, probs, compiled):
        leaves = [both.clone().requires_grad_(), probs.clone().requires_grad_()]
        out = activate(*fields, *leaves, compiled=compiled)
        out.backward(grad.to(out.dtype))
        return [out, *(leaf.grad for leaf in leaves)]

    got, expected = run(both, probs, True), run(both.double(), probs.double(), False)
    assert got[0].dtype == torch.bfloat16 and got[2].dtype == torch.float32
    for own, wide in zip(got, expected, strict=True):
        close(own, wide, 1e-2)


@pytest.mark.parametrize("topk", [1, 8])
def test_rows(topk):
    tokens, experts = 500, 16
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    chosen.scatter_(1, torch.rand(tokens, experts, device="cuda").topk(topk).indices, True)
    x = torch.randn(tokens, INPUTS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    order = RowOrder.by_expert(chosen, topk)
    out = order.to_tokens(order.to_rows(x))
    out.backward(torch.ones_like(out))
    close(out, topk * x.detach().double(), 1e-2)
    assert torch.equal(x.grad, torch.full_like(x, topk))


def test_nothing_waits_for_the_host():
    """Counts, products, activation and orders, forward and backward."""
    tokens, experts, topk = 512, 16, 4
    x = torch.randn(tokens, INPUTS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(experts, 2 * OUTPUTS, INPUTS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    down = torch.randn(experts, INPUTS, OUTPUTS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(tokens, experts, device="cuda", requires_grad=True)

    def step():
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.detach().topk(topk).indices, True)
        order, groups = RowOrder.by_expert(chosen, topk), Groups(chosen.sum(0), tokens * topk)
        inner = activate(F.silu, None, 0.0, grouped_linear(order.to_rows(x), up, groups), order.probs(scores))
        out = order.to_tokens(grouped_linear(inner, down, groups))
        out.backward(torch.ones_like(out))

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
