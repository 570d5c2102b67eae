"""Sizes that follow from the fields."""

import json

import pytest

from miles.config.resolve import resolve
from miles.hf.parallel import ParallelSizes

TP2, PP2 = {"tensor_model_parallel_size": "2"}, {"pipeline_model_parallel_size": "2"}
EP2 = {"expert_model_parallel_size": "2"}
CHUNK = "num_layers_per_virtual_pipeline_stage"
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS |= {"num_hidden_layers": 4, "num_experts": 8}
EXTERNAL = {"colocate": None, "rollout_external_engine_addrs": "10.0.0.7:30000 10.0.0.8:30000"}
LAYOUTS = [
    # changes, engines, those that share GPUs with the trainer, tensor-parallel ranks of each, GPUs reserved for engines
    ({}, 4, 4, 1, 4),
    ({"rollout_num_gpus_per_engine": "2"}, 2, 2, 2, 4),
    ({"rollout_num_gpus": "8", "rollout_num_gpus_per_engine": "2"}, 4, 2, 2, 8),
    ({"device": "cuda", "rollout_num_gpus": "8", "rollout_num_gpus_per_engine": "2"}, 4, 2, 2, 8),
    ({"device": "cuda", "colocate": None, "rollout_num_gpus": "6", "rollout_num_gpus_per_engine": "2"}, 3, 0, 2, 6),
    ({**EXTERNAL, "rollout_num_gpus_per_engine": "4"}, 2, 0, 4, 0),
    ({**EXTERNAL, "rollout_external": ""}, 2, 0, 1, 0),
    ({"debug_rollout_only": "", "rollout_num_gpus": "4", "rollout_num_gpus_per_engine": "4", "sglang_pp_size": "2"},
     1, 0, 2, 4),
    ({"device": "cuda", "rollout_num_gpus_per_engine": "4", "sglang_dp_size": "4", "sglang_enable_dp_attention": ""},
     1, 1, 4, 4),
    ({"device": "cuda", "actor_num_gpus_per_node": "8", "rollout_num_gpus_per_engine": "8", "sglang_dp_size": "2",
      "sglang_ep_size": "8", "sglang_enable_dp_attention": ""}, 1, 1, 8, 8),
    ({"loss_type": "sft_loss", **EXTERNAL}, 0, 0, 1, 0),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "engines", "colocated", "tensor_parallel", "reserved"), LAYOUTS)
def test_layouts(argv, changes, engines, colocated, tensor_parallel, reserved):
    config = resolve(argv(**changes)).config
    assert config.num_engines == engines and config.num_colocated_engines == colocated
    assert config.engine_tp_size == tensor_parallel and config.reserved_rollout_gpus == reserved


def test_sizes(argv, folder):
    (folder / "model" / "config.json").write_text(json.dumps(EXPERTS))
    flags = {**TP2, "sequence_parallel": "", "actor_num_gpus_per_node": "8", "num_gpus_per_node": "8"}
    config = resolve(argv(**flags, **PP2, **{CHUNK: "1"}, **EP2)).config
    assert config.parallel_sizes == ParallelSizes(tp=2, pp=2, ep=2, etp=1, dp=2, sequence_parallel=True)
    assert (config.least_micro_batches, config.virtual_stages, config.sharers_of_experts) == (2, 2, 2)
    config = resolve(argv(**flags, context_parallel_size="2")).config
    assert config.parallel_sizes == ParallelSizes(tp=2, cp=2, etp=2, dp=2, sequence_parallel=True)
    assert (config.least_micro_batches, config.virtual_stages) == (1, None)
