"""A layer that asks for its micro-batch gets the rows of its own hidden states, on every stage and when recomputed.

All that layers add is zero, so that their hidden states are the embeddings of their tokens, on whatever rank.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from miles.backends.trainer.side_input import micro_batch, running, with_its_micro_batch
from miles.utils.network import free_ports
from tests.fast.ranks import leave_world

ROOT = Path(__file__).parents[4]
PP2 = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
SMALL = ("--micro-batch-size", "2")
CASES = {
    "PP 2": (PP2, 1),
    "PP 2, recomputed": ((*PP2, *FULL), 2),
    "PP 2 VPP 2, recomputed": ((*INTERLEAVED, *FULL), 2),
    "PP 2, recomputed in part": ((*PP2, *SELECTIVE), 2),
    "CP 2, recomputed": (("--context-parallel-size", "2", *FULL), 2),
    "TP 2, SP, recomputed in part": (("--tensor-model-parallel-size", "2", "--sequence-parallel", *SELECTIVE), 2),
}


def test_outside_of_a_pass_there_is_none():
    with pytest.raises(RuntimeError, match="no micro-batch is in the model"):
        micro_batch()
    with running("first"):
        again = with_its_micro_batch(micro_batch)
        with running("second"):
            assert (micro_batch(), again(), micro_batch()) == ("second", "first", "second")
        assert micro_batch() == "first"
    assert again() == "first"


def test_layers_see_the_rows_of_their_own_micro_batch(run_ranks, tmp_path):
    from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint

    make_tiny_checkpoint(tmp_path / "model", num_layers=4)
    run_ranks(__file__, 2, str(tmp_path / "model"), str(tmp_path), *map(str, free_ports(len(CASES))))


# --- what the ranks run ---


def main(rank, checkpoint, folder, ports):
    torch.set_num_threads(1)
    for (name, (flags, passes)), port in zip(CASES.items(), ports, strict=True):
        scratch = folder / f"{name} {rank}"
        scratch.mkdir()
        seen_by_layers(name, rank, checkpoint, scratch, flags, passes, port)


def seen_by_layers(name, rank, checkpoint, folder, flags, passes, port):
    """passes: times that a layer computes each micro-batch of a training step."""
    from megatron.core import parallel_state
    from safetensors.torch import load_file

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor

    spec = importlib.util.spec_from_file_location("loss_trace", ROOT / "scripts" / "loss_trace.py")
    tracing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tracing)
    config = tracing.trace_config(checkpoint, 2, 1, [*SMALL, "--lr", "0", *flags], folder)
    actor = MegatronTrainRayActor(config, rank, 2)
    actor.init(f"127.0.0.1:{port}")
    model = actor.model
    embedding_VH = load_file(Path(checkpoint) / "model.safetensors")["model.embed_tokens.weight"]
    layers = [layer for chunk in model.chunks for layer in chunk.decoder.layers]
    with torch.no_grad():
        for layer in layers:
            layer.self_attention.linear_proj.weight.zero_()
            layer.mlp.linear_fc2.weight.zero_()
            layer.pre_mlp_layernorm.weight.fill_(1.0)
    seen = []

    def compare(number, hidden_T1H, normed):
        want_TH = embedding_VH[micro_batch().tokens_T]
        if config.sequence_parallel:
            want_TH = want_TH.chunk(2)[parallel_state.get_tensor_model_parallel_rank()]
        if normed:
            mean = want_TH.pow(2).mean(-1, keepdim=True)
            want_TH = want_TH * torch.rsqrt(mean + layers[0].config.layernorm_epsilon)
        assert hidden_T1H.shape[0] == len(want_TH), name
        torch.testing.assert_close(hidden_T1H[:, 0], want_TH, atol=1e-5, rtol=1e-5)
        seen.append(number if normed else "whole layer")

    def before_mlp(number):
        return lambda _, arguments: compare(number, arguments[0].detach(), normed=True)

    def before_layer(_, arguments, keywords):
        compare(None, (arguments[0] if arguments else keywords["hidden_states"]).detach(), normed=False)

    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(before_mlp(number))
        layer.register_forward_pre_hook(before_layer, with_kwargs=True)
    shard = tracing.made_up_shard(config, model.hf_config.vocab_size, model.grid.dp_rank)
    micro_batches = sum(len(step.micro_batches) for step in shard.steps)
    assert micro_batches > 4 and len({len(batch) for step in shard.steps for batch in step.micro_batches}) == 1
    actor.trainer.scores(shard)
    assert [seen.count(number) for number in range(len(layers))] == [micro_batches] * len(layers), name
    seen.clear()
    columns = {"old_log_probs": torch.zeros(int(shard.batch.response_offsets[-1]))}
    columns["advantages"] = columns["old_log_probs"] + 1.0
    actor.trainer.train(shard, columns if model.grid.is_last_stage else {})
    assert [seen.count(number) for number in range(len(layers))] == [passes * micro_batches] * len(layers), name
    with pytest.raises(RuntimeError, match="no micro-batch"):
        micro_batch()
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), sys.argv[6:])
