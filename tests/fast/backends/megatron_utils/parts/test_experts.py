"""Experts as grouped products, and the order of their rows, against Megatron's loop over experts: to the bit."""

import sys
from pathlib import Path

import pytest
import torch

EXPERTS, HIDDEN, FFN, TOPK = 4, 48, 32, 2
# Rows of each expert: uneven, without one, all on one, none at all.
COUNTS = [(5, 7, 3, 9), (0, 20, 1, 4), (0, 0, 30, 0), (0, 0, 0, 0)]
# Fields of TransformerConfig.
KINDS = {
    "SwiGLU": {},
    "gpt-oss": dict(
        add_bias_linear=True, activation_func="quick_gelu", activation_func_clamp_value=0.5, glu_linear_offset=1.0
    ),
    "limited": dict(activation_func_clamp_value=0.5),
    "probabilities on the input": dict(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True),
}


def test_as_megatrons_loop(run_ranks, tmp_path):
    run_ranks(__file__, 1, str(tmp_path))


def main(folder):
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from miles.backends.megatron_utils.patches import cpu_support

    torch.set_num_threads(1)
    cpu_support.install()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for kind, fields in KINDS.items():
        check_kind(kind, fields, get_default_pg_collection(), folder)
    torch.distributed.destroy_process_group()


def check_kind(kind, fields, groups, folder):
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from miles.backends.megatron_utils.parts.experts import GroupedExperts

    torch.manual_seed(0)
    config, scratch = config_of(fields), folder / kind
    loop = SequentialMLP(
        EXPERTS,
        config,
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=CopiedRow.of(RowParallelLinear)),
        groups,
    )
    for parameter in loop.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    # A checkpoint of the one is a checkpoint of the other.
    own = GroupedExperts(EXPERTS, config, groups)
    scratch.mkdir()
    dist_checkpointing.save(loop.sharded_state_dict("mlp.experts."), str(scratch))
    loaded = dist_checkpointing.load(own.sharded_state_dict("mlp.experts."), str(scratch))
    own.load_state_dict({name.removeprefix("mlp.experts."): value for name, value in loaded.items()})
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, stacked(loop, name, lambda weight: weight.detach())), (kind, name)

    for counts in COUNTS:
        counts = torch.tensor(counts)
        rows, probs, grad = (
            torch.randn(counts.sum(), HIDDEN),
            torch.rand(counts.sum()),
            torch.randn(counts.sum(), HIDDEN),
        )
        results = [run(experts, rows, counts, probs, grad) for experts in (loop, own)]
        weights = {name: stacked(loop, name, lambda weight: weight.grad) for name, _ in own.named_parameters()}
        gradients = {name: parameter.grad for name, parameter in own.named_parameters()}
        for name, value in (results[0] | weights).items():
            assert torch.equal((results[1] | gradients)[name], value), (kind, counts, name)


class CopiedRow:
    """Megatron's MLP adds the second bias in place, which autograd refuses on the view that the projection returns."""

    @staticmethod
    def of(row):
        return type("Row", (row,), {"forward": lambda self, x: (lambda y, b: (y.clone(), b))(*row.forward(self, x))})


def config_of(fields):
    import torch.nn.functional as F
    from megatron.core.activations import quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {"add_bias_linear": False, "moe_router_topk": TOPK, **fields}
    fields["activation_func"] = quick_gelu if "activation_func" in fields else F.silu
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * FFN,
        moe_ffn_hidden_size=FFN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        gated_linear_unit=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        **fields,
    )


def run(experts, rows, counts, probs, grad):
    experts.zero_grad()
    rows, probs = rows.clone().requires_grad_(), probs.clone().requires_grad_()
    out, bias = experts(rows, counts, probs)
    assert bias is None
    out.backward(grad)
    return {"out": out, "rows": rows.grad} | ({} if probs.grad is None else {"probs": probs.grad})


def stacked(loop, name, value):
    return torch.stack([value(expert.get_parameter(name)) for expert in loop.local_experts])


@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("topk", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_of_rows_is_megatrons(tokens, topk, dtype):
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from miles.backends.megatron_utils.parts.rows import RowOrder

    torch.manual_seed(0)
    chosen = torch.zeros(tokens, 8, dtype=torch.bool).scatter(1, torch.rand(tokens, 8).topk(topk).indices, True)
    x, probs, grad = torch.randn(tokens, 5, dtype=dtype), torch.rand(tokens, 8), torch.randn(tokens, 5, dtype=dtype)
    scale = torch.randn(tokens * topk, 1, dtype=dtype)

    def ours(x, probs):
        order = RowOrder.by_expert(chosen, topk)
        return order.to_rows(x), order.probs(probs), order.to_tokens

    def theirs(x, probs):
        rows, row_probs, indices, *_ = permute(x, chosen, probs, num_out_tokens=tokens * topk)
        return rows, row_probs, lambda rows: unpermute(rows, indices, x.shape)

    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
        rows, row_probs, back = function(*leaves)
        out = back((rows * scale * row_probs[:, None]).to(dtype))
        out.backward(grad)
        results.append([rows, row_probs, out, *(leaf.grad for leaf in leaves)])
    for own, expected in zip(*results, strict=True):
        # In half precision Megatron's backward pass rounds after every sum.
        assert own.dtype == expected.dtype
        torch.testing.assert_close(own, expected, rtol=0.0 if dtype == torch.float32 else 2**-6, atol=0.0)


def test_gradients_add_up_where_megatron_adds_them_up():
    """The first of a step is copied over what is there, and Megatron is told not to add any itself."""
    from miles.backends.megatron_utils.parts.grouped import Groups, grouped_linear

    torch.manual_seed(0)
    weight = torch.randn(2, 3, 4, requires_grad=True)
    batches = [(torch.randn(5, 4), Groups(torch.tensor(counts), 5)) for counts in ([2, 3], [5, 0], [0, 5])]
    grads = [torch.autograd.grad(grouped_linear(x, weight, groups).sum(), weight)[0] for x, groups in batches]
    for step in range(2):
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(2, 3, 4), False
        for x, groups in batches:
            grouped_linear(x, weight, groups).sum().backward()
            assert weight.grad_added_to_main_grad
        assert torch.equal(weight.main_grad, grads[0] + grads[1] + grads[2]), step


def test_rows_by_key():
    from miles.backends.megatron_utils.parts.rows import RowOrder

    rows = torch.arange(5.0, requires_grad=True)
    order = RowOrder.by_key(torch.tensor([1, 0, 2, 1, 0]))
    assert order.to_rows(rows).tolist() == [1, 4, 0, 3, 2]
    assert torch.equal(order.to_tokens(order.to_rows(rows)), rows)
    order.to_rows(rows).backward(torch.arange(5.0))
    assert rows.grad.tolist() == [2, 0, 4, 3, 1]


if __name__ == "__main__":
    main(Path(sys.argv[4]))
