"""Megatron's own flags: what only saves memory or time changes no bit; what changes the loss changes it as it says.

Two data-parallel ranks on gloo; each runs this file.
"""

import sys
from pathlib import Path

import pytest
import torch

from miles.utils.network import free_port

FULL = ("--recompute-granularity", "full")
SELECTIVE = ("--recompute-granularity", "selective")
UNIFORM = (*FULL, "--recompute-method", "uniform", "--recompute-num-layers")
BLOCK = (*FULL, "--recompute-method", "block", "--recompute-num-layers")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "9000")
SAME = {
    "dense": {
        "again": (),
        "uniform, single layers": (*UNIFORM, "1"),
        "uniform, both layers at once": (*UNIFORM, "2"),
        "block, the first layer": (*BLOCK, "1"),
        "core_attn": SELECTIVE,
        "mlp and core_attn": (*SELECTIVE, "--recompute-modules", "mlp", "core_attn"),
        "overlapped reduction": ("--overlap-grad-reduce",),
    },
    "experts": {
        "again": (),
        "uniform": (*UNIFORM, "1"),
        "moe and core_attn": (*SELECTIVE, "--recompute-modules", "moe", "core_attn"),
        "allgather": ("--moe-token-dispatcher-type", "allgather"),
    },
}
# Two micro-batches in the first step, three in the second.
DYNAMIC = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "28")
# Responses have up to 12 tokens: chunks of 5 cut a micro-batch into several. Norms are summed up bucket by bucket.
ROUNDING = {
    "chunks of logits": ("--log-probs-chunk-size", "5"),
    "overlapped reduction": OVERLAP,
    "overlapped gather too": (*OVERLAP, "--overlap-param-gather"),
    "overlap of uneven micro-batches": (*OVERLAP, "--overlap-param-gather", *DYNAMIC),
}
BALANCED = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.5")
PLAIN = ("--no-use-distributed-optimizer",)


def write_config(folder, kind):
    from transformers import Qwen3Config, Qwen3MoeConfig

    sizes = dict(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=251,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=kind == "dense",
    )
    config = Qwen3Config(**sizes)
    if kind == "experts":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
        config = Qwen3MoeConfig(**sizes | dict(architectures=["Qwen3MoeForCausalLM"]), **experts)
    config.save_pretrained(folder)


def configuration(folder, *flags):
    from miles.utils.arguments import parse_args

    prompts = folder.parent / "prompts.jsonl"
    prompts.write_text('{"input": "a", "label": "b"}\n')
    defaults = {"--lr": "0.001", "--global-batch-size": "8"}
    flags = [*flags, *(word for pair in defaults.items() if pair[0] not in flags for word in pair)]
    return parse_args(
        [
            *("--device", "cpu", "--hf-checkpoint", str(folder), "--prompt-data", str(prompts), "--label-key", "label"),
            *("--rm-type", "exact", "--num-rollout", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
            *(
                "--rollout-max-response-len",
                "16",
            ),
            *("--colocate", "--no-offload-train", "--no-offload-rollout", "--actor-num-gpus-per-node", "2"),
            *("--data-pad-size-multiplier", "4", "--entropy-coef", "0.01", *flags),
        ]
    )


def build(folder, *flags):
    """A trainer of the same random weights each time."""
    from miles.backends.megatron_utils.trained_model import MegatronModel
    from miles.backends.trainer.shard_trainer import ShardTrainer, policy_loss
    from miles.hf.config import load_hf_config

    config = configuration(folder, *flags)
    model = MegatronModel(config, load_hf_config(folder))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.chunks[0].parameters():
            # Drawn in fp32: bf16 draws other numbers.
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + float(parameter.dim() == 1))
    model.build_optimizer(config, total_steps=10)
    return ShardTrainer(model, policy_loss(model))


def train(folder, *flags):
    """Metrics of two steps, and the model with its weights and gradients after them."""
    trainer = build(folder, *flags)
    shard = _shard_of(trainer)
    return trainer.train(shard, columns_of(trainer, shard)), trainer.model.chunks[0]


def columns_of(trainer, shard):
    """What the loss reads beside the shard's own columns."""
    from miles.training.rollout_columns import trained_columns

    columns = {"old_log_probs": trainer.log_probs(shard)}
    return columns | trained_columns(trainer.config, shard.batch, columns, lambda _: None)


def differences(result, other):
    """Names of all that isn't the same to the last bit."""
    (metrics, model), (others, other_model) = result, other
    names = [f"step {i} {name}" for i in (0, 1) for name, value in metrics[i].items() if value != others[i][name]]
    weights = zip(model.named_parameters(), other_model.parameters(), strict=True)
    return names + [name for (name, weight), other in weights if not torch.equal(weight, other)]


def check_that_nothing_changes(root):
    for kind, variants in SAME.items():
        expected = train(root / kind)
        assert expected[0][0]["train/loss"] != expected[0][1]["train/loss"]
        wrong = {
            name: found
            for name, flags in variants.items()
            if (found := differences(train(root / kind, *flags), expected))
        }
        assert not wrong, f"{kind}: {wrong}"
        assert differences(train(root / kind, "--lr", "0.0011"), expected)


def check_that_only_rounding_changes(root):
    for kind in SAME:
        expected, model = train(root / kind)
        for name, flags in ROUNDING.items():
            metrics, other = train(root / kind, *flags)
            for step in (0, 1):
                assert metrics[step] == pytest.approx(expected[step], rel=1e-5, abs=1e-6), (kind, name)
            for weight, changed in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(changed, weight, atol=5e-5, rtol=0)


def check_that_the_head_is_waited_for(root):
    """Its weight is read outside of its call, before which Megatron waits for a gather."""
    trainer = build(root / "experts")
    waits, head = [], trainer.model.chunks[0].output_layer
    head.register_forward_pre_hook(lambda module, _: waits.append(module))
    shard = _shard_of(trainer)
    trainer.log_probs(shard)
    assert waits == [head] * sum(len(step.micro_batches) for step in shard.steps)


def _shard_of(trainer):
    from megatron.core import parallel_state

    from scripts.loss_trace import made_up_shard

    return made_up_shard(trainer.config, 251, parallel_state.get_data_parallel_rank())


def check_precision(root):
    """Gradients of bf16 weights over 4 micro-batches: added up in fp32, or not."""
    norms, micro_batch = {}, ("--micro-batch-size", "1")
    for name, flags, dtype in (
        ("fp32", micro_batch, torch.float32),
        ("bf16", ("--bf16", *micro_batch), torch.float32),
        ("bf16 in bf16", ("--bf16", "--no-accumulate-allreduce-grads-in-fp32", *micro_batch), torch.bfloat16),
    ):
        metrics, model = train(root / "dense", *flags)
        assert {parameter.main_grad.dtype for parameter in model.parameters()} == {dtype}
        norms[name] = metrics[0]["train/grad_norm"]
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=5e-3)
    assert norms["bf16"] != norms["bf16 in bf16"] == pytest.approx(norms["fp32"], rel=2e-2)


def check_balancing_loss(root):
    """The router's gradient grows by that of Switch's loss (arXiv 2101.03961, eq. 4), a mean over the step's tokens."""
    import torch.distributed as dist

    from miles.backends.megatron_utils.model import GPTModel

    inputs, original = [], GPTModel.forward

    def forward(self, *args, **kwargs):
        def keep(_, arguments):
            inputs.append(arguments[0].detach()[:, 0])

        handle = self.decoder.layers[-1].mlp.router.register_forward_pre_hook(keep)
        try:
            return original(self, *args, **kwargs)
        finally:
            handle.remove()

    one_step = (*PLAIN, "--global-batch-size", "16", "--micro-batch-size", "3", "--lr", "0", "--clip-grad", "0")
    _, model = train(root / "experts", *one_step)
    GPTModel.forward = forward
    try:
        _, balanced = train(root / "experts", *one_step, *BALANCED)
    finally:
        GPTModel.forward = original
    # The pass for log-probabilities comes first and sees the same.
    inputs = inputs[len(inputs) // 2 :]
    weight = balanced.decoder.layers[-1].mlp.router.weight.detach().clone().requires_grad_()
    tokens = torch.tensor(float(sum(len(x_TH) for x_TH in inputs)))
    dist.all_reduce(tokens)
    for x_TH in inputs:
        p_TE = torch.softmax(x_TH @ weight.t(), dim=1)
        chosen_E = torch.zeros_like(p_TE).scatter(1, p_TE.topk(2).indices, 1).mean(0) / 2
        loss = 0.5 * p_TE.shape[1] * (chosen_E * p_TE.mean(0)).sum()
        (loss * len(x_TH) / tokens).backward()
    dist.all_reduce(weight.grad)
    grown = (
        balanced.decoder.layers[-1].mlp.router.weight.main_grad - model.decoder.layers[-1].mlp.router.weight.main_grad
    )
    torch.testing.assert_close(grown, weight.grad, atol=1e-4 * weight.grad.abs().max().item(), rtol=0)


def check_schedule(root):
    rises = ("--weight-decay-incr-style", "linear", "--start-weight-decay", "0.1", "--end-weight-decay", "0.3")
    warm_up = ("--lr-decay-iters", "10", "--lr-warmup-fraction", "0.2", "--lr-warmup-init", "0.0002")
    wsd = ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "4", "--lr-wsd-decay-style", "linear")
    state = build(root / "dense", *warm_up, *wsd, *rises).model.state
    rates, decays = [], []
    for _ in range(11):
        group = max(state.optimizer.param_groups, key=lambda group: group["weight_decay"])
        rates.append(group["lr"] * 1000)
        decays.append(group["weight_decay"])
        state.scheduler.step(increment=1)
    assert rates == pytest.approx([0.2, 0.6, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert decays == pytest.approx([0.1 + 0.02 * step for step in range(11)])


def check_fused_adam(root):
    """The kernel of a GPU exists on a CPU too. A loaded state leaves it on, with a count of steps for each weight."""
    from miles.backends.megatron_utils import torch_adam

    trainers = [build(root / "dense"), build(root / "dense")]
    plain, fused = (trainer.model.state for trainer in trainers)
    torch_adam.fuse(fused.optimizer)
    shard = _shard_of(trainers[0])
    columns = columns_of(trainers[0], shard)
    for trainer in trainers:
        trainer.train(shard, columns)
    fused.optimizer.load_state_dict(plain.optimizer.state_dict())
    (inner,) = torch_adam.inner_optimizers(fused.optimizer)
    assert all(group["fused"] and not group["foreach"] for group in inner.param_groups)
    steps = [state["step"] for state in inner.state.values()]
    assert {float(step) for step in steps} == {2} and len({id(step) for step in steps}) == len(steps) > 1
    for trainer in trainers:
        trainer.train(shard, columns)
    for weight, other in zip(plain.models[0].parameters(), fused.models[0].parameters(), strict=True):
        torch.testing.assert_close(other, weight, atol=1e-6, rtol=0)


def check_norms(root):
    """Of all gradients at once, as on a GPU, and clipped to a tenth of what they are."""
    from miles.backends.megatron_utils.patches import norms

    tight = ("--clip-grad", "0.2")
    expected, model = train(root / "dense", *tight)
    norms.install()
    metrics, other = train(root / "dense", *tight)
    assert expected[0]["train/grad_norm"] > 1
    assert metrics[0] == pytest.approx(expected[0], rel=1e-6)
    for weight, changed in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(changed, weight, atol=2e-5, rtol=0)


def main(rank, world_size, root, master):
    from miles.backends.megatron_utils.initialize import initialize

    torch.set_num_threads(1)
    initialize(configuration(root / "dense"), rank, world_size, master)
    check_that_nothing_changes(root)
    check_that_only_rounding_changes(root)
    check_that_the_head_is_waited_for(root)
    check_precision(root)
    check_balancing_loss(root)
    check_schedule(root)
    check_fused_adam(root)
    check_norms(root)
    torch.distributed.barrier()


def test_megatron_flags(run_ranks, tmp_path):
    for kind in SAME:
        write_config(tmp_path / kind, kind)
    run_ranks(__file__, 2, str(tmp_path), f"127.0.0.1:{free_port()}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]), sys.argv[5])
