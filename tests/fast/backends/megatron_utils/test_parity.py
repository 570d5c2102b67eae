"""Megatron against transformers: log-probabilities and every gradient, fp32, packed. Each rank runs this file."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from miles.utils.network import free_port

SIZES = dict(
    vocab_size=251,  # padded under tensor parallelism
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 16384}, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}
LAYOUTS = {
    "one": [],
    "tp2_sp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
}
LENGTHS = [100, 7, 61, 24]
PADDING = 64


def make_checkpoint(folder, hf_config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.normal_(center, 0.15 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def weights_N():
    return torch.randn(sum(LENGTHS) - len(LENGTHS), generator=torch.Generator().manual_seed(2)) / sum(LENGTHS)


def reference(folder):
    """Log-probability of every token after its sequence's first, and the gradients of their weighted sum."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    log_probs = []
    for tokens in sequences():
        log_p_TV = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        log_probs.append(log_p_TV.gather(1, tokens[1:, None])[:, 0])
    log_probs_N = torch.cat(log_probs)
    (log_probs_N * weights_N()).sum().backward()
    return log_probs_N.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def packed_batch():
    from miles.training.packing import PackedBatch

    tokens = [*sequences(), torch.zeros(PADDING, dtype=torch.int64)]
    starts = torch.tensor([0, *(len(t) for t in tokens)]).cumsum(0)
    count = sum(LENGTHS) - len(LENGTHS)
    empty = torch.zeros(count, dtype=torch.int64)
    return PackedBatch(
        tokens_T=torch.cat(tokens),
        position_ids_T=torch.cat([torch.arange(len(t)) for t in tokens]),
        cu_seqlens=starts.int(),
        max_seqlen=max(len(t) for t in tokens),
        logit_index_N=torch.cat([start + torch.arange(n - 1) for start, n in zip(starts, LENGTHS, strict=False)]),
        target_N=torch.cat([t[1:] for t in sequences()]),
        weight_N=weights_N(),
        mask_N=torch.ones(count, dtype=torch.bool),
        sample_N=empty,
        response_index_N=empty,
        columns={},
        sample_columns={},
    )


def run_config(folder, layout, world_size):
    from miles.utils.arguments import parse_args

    prompts = folder.parent / "prompts.jsonl"
    prompts.write_text('{"input": "a", "label": "b"}\n')
    return parse_args(
        [
            *("--device", "cpu", "--hf-checkpoint", str(folder), "--prompt-data", str(prompts), "--label-key", "label"),
            *("--loss-type", "sft_loss", "--num-rollout", "1", "--rollout-batch-size", "1"),
            *("--n-samples-per-prompt", "1", "--actor-num-gpus-per-node", str(world_size), *LAYOUTS[layout]),
        ]
    )


def compare(folder, layout, world_size):
    from megatron.core import parallel_state

    from miles.backends.megatron_utils import model as building
    from miles.backends.megatron_utils.hf import family_for, load_hf_config
    from miles.backends.megatron_utils.hf.checkpoint_io import CheckpointIndex, load_into
    from miles.backends.megatron_utils.training import run_micro_batches
    from miles.training.vocab_parallel import log_probs_and_entropy
    from miles.weight_sync.gather import ParallelInfo, hf_tensors, live

    hf_config = load_hf_config(folder)
    config, family = run_config(folder, layout, world_size), family_for(hf_config)
    model = building.build_model(config, hf_config)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    stages = building.stage_layers(model.config)
    stage, tp_rank = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    tp_size, pp_size = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    is_last = stage == pp_size - 1
    load_into(model, family, hf_config, folder, stages[stage], tp_rank, tp_size, stage == 0, is_last)
    state = building.build_train_state(config, model, total_steps=1)

    def weighted_sum(logits_NV, packed):
        log_probs_N, _ = log_probs_and_entropy(
            logits_NV, packed.target_N, 1.0, group=tp_group, entropy_grad=False, vocab_size=hf_config.vocab_size
        )
        return (log_probs_N * packed.weight_N).sum(), {"log_probs": log_probs_N.detach().clone()}

    state.model.zero_grad_buffer()
    collected = run_micro_batches(state.model, [packed_batch()], weighted_sum, forward_only=False)
    expected_N, gradients = reference(folder)
    if is_last:
        difference = (collected[0]["log_probs"] - expected_N).abs().max().item()
        print(f"{folder.name} {layout}: log-probabilities differ by {difference:.1e}")
        assert difference < 2e-5
    # Gathered like weights, the gradients come in Hugging Face's names and layouts.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    parallel = ParallelInfo(tp_rank, tp_size, lambda: tp_group, stage, pp_size, lambda: pp_group, stages)
    gathered = dict(hf_tensors(model, family, hf_config, parallel, CheckpointIndex(folder), live))
    assert gathered.keys() == gradients.keys()
    errors = {
        name: ((gathered[name] - expected).abs().max() / expected.abs().max()).item()
        for name, expected in gradients.items()
    }
    print(f"{folder.name} {layout}: gradients differ by {max(errors.values()):.1e}, {max(errors, key=errors.get)}")
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


def main(rank, world_size, layout, root, master):
    from miles.backends.megatron_utils.initialize import initialize

    torch.set_num_threads(1)
    initialize(run_config(root / "llama", layout, world_size), rank, world_size, master)
    for family in FAMILIES:
        compare(root / family, layout, world_size)
    torch.distributed.barrier()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_transformers(run_ranks, tmp_path, layout):
    for family, hf_config in FAMILIES.items():
        make_checkpoint(tmp_path / family, hf_config)
    run_ranks(__file__, 2 if LAYOUTS[layout] else 1, layout, str(tmp_path), f"127.0.0.1:{free_port()}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4], Path(sys.argv[5]), sys.argv[6])
