"""Every rule of the trainer's parallel sizes, broken once."""

import json

import pytest

from miles.config.layout import ParallelSizes
from miles.config.layout_rules import LAYOUT_RULES, virtual_stages
from miles.config.resolve import ConfigError, resolve

TP2, PP2 = {"tensor_model_parallel_size": "2"}, {"pipeline_model_parallel_size": "2"}
EP2 = {"expert_model_parallel_size": "2"}
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
CHUNK = "num_layers_per_virtual_pipeline_stage"
EXPERTS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_experts": 8}
# {rule: [(changed flags, part of the sentence)]}; a third item is the model's config.json.
CASES = {
    "_world": [
        ({"actor_num_gpus_per_node": "3", "rollout_batch_size": "9", **TP2},
         "3 trainer ranks (--actor-num-nodes 1 x --actor-num-gpus-per-node 3) cannot be divided into replicas of 2"),
        ({"context_parallel_size": "3", **TP2},
         "replicas of 6 (--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x --context-parallel-si"),
    ],
    "_sequence_parallel": [
        ({"sequence_parallel": ""}, "--sequence-parallel needs --tensor-model-parallel-size above 1, it is 1"),
    ],
    "_experts_in_world": [
        ({"expert_model_parallel_size": "8"}, "4 trainer ranks a pipeline stage cannot be divided into groups of 8 for",
         EXPERTS),
        ({**EP2, **PP2, "expert_tensor_parallel_size": "2"}, "whose product divides 2", EXPERTS),
    ],
    "_expert_tokens": [
        ({**EP2, "moe_token_dispatcher_type": "allgather"}, "needs the same number of tokens on all 2 ranks", EXPERTS),
    ],
    "_streamed_experts": [
        ({**EP2, "stream_optimizer_state_to_disk": ""}, "experts that are shared out have one of their own", EXPERTS),
    ],
    "_uneven_stages": [
        ({FIRST: "1", LAST: "2"}, "--decoder-first-pipeline-num-layers 1 and --decoder-last-pipeline-num-layers 2 wit"),
        ({CHUNK: "1"}, "--num-layers-per-virtual-pipeline-stage 1 interleaves pipeline stages, and --pipeline-model"),
    ],
    "_heads": [
        ({"tensor_model_parallel_size": "4"}, "--tensor-model-parallel-size 4 does not divide the model's num_key_"),
    ],
    "_layers": [
        ({"pipeline_model_parallel_size": "3", "actor_num_gpus_per_node": "3", "rollout_batch_size": "9"},
         "--pipeline-model-parallel-size 3 does not divide the model's num_hidden_layers 4; choose a divisor"),
        ({**PP2, FIRST: "4"}, "leave 0, which 1 further pipeline stages cannot share"),
        ({**PP2, FIRST: "1", LAST: "1"}, "leave 2, which 0 further pipeline stages cannot share"),
        ({"pipeline_model_parallel_size": "4", LAST: "2"}, "leave 2, which 3 further pipeline stages cannot share"),
        ({**PP2, CHUNK: "2"}, "does not cut a pipeline stage of 2 layers into two or more equal parts"),
        ({**PP2, FIRST: "1", CHUNK: "1"}, "does not cut a pipeline stage of 1 layers"),
        ({**PP2, FIRST: "2", CHUNK: "1"}, "with pipeline stages of 2 and 4 layers: interleaving needs the same number",
         {"num_hidden_layers": 6}),
    ],
    "_experts": [
        (EP2, "--expert-model-parallel-size 2 needs a model with experts, this one has none; leave it out"),
        (EP2, "--expert-model-parallel-size 2 does not divide the model's 9 experts", {"n_routed_experts": 9}),
        ({"expert_tensor_parallel_size": "2"}, "--expert-tensor-parallel-size 2 needs a model with experts, this one"),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": "0.1"},
         "--moe-aux-loss-coeff 0.1 needs a model with experts, this one has none"),
        ({"moe_z_loss_coeff": "0.1"}, "--moe-z-loss-coeff 0.1 needs a model with experts, this one has none"),
    ],
    "_needs_sequence_parallel": [
        (TP2, "--tensor-model-parallel-size 2 of a model with experts needs --sequence-parallel", EXPERTS),
        (TP2, "of a model with latent attention needs --sequence-parallel", {"text_config": {"kv_lora_rank": 8}}),
        (TP2, "of a model with gated delta nets needs --sequence-parallel", {"linear_num_key_heads": 8}),
    ],
}  # fmt: skip


def with_model(folder, model):
    if model:
        (folder / "model" / "config.json").write_text(json.dumps(model[0]))


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in LAYOUT_RULES]


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_refused(argv, folder, case):
    changes, expected, *model = case
    with_model(folder, model)
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(expected in problem for problem in caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    "case",
    [
        ({**PP2, FIRST: "1"},),
        ({**PP2, FIRST: "1", LAST: "3"},),
        ({"pipeline_model_parallel_size": "4", FIRST: "1", LAST: "1"},),
        ({**PP2, CHUNK: "1"},),
        ({**PP2, FIRST: "2", LAST: "2", CHUNK: "1"},),
        ({"context_parallel_size": "2", **TP2},),
        ({"expert_model_parallel_size": "4"}, EXPERTS),
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": "0.01", "moe_z_loss_coeff": "0.1"},
            EXPERTS,
        ),
        ({**EP2, **TP2, "sequence_parallel": "", "expert_tensor_parallel_size": "2"}, EXPERTS),
    ],
)
def test_taken(argv, folder, case):
    changes, *model = case
    with_model(folder, model)
    resolve(argv(**changes))


def test_sizes(argv, folder):
    with_model(folder, [EXPERTS])
    flags = {**TP2, "sequence_parallel": "", "actor_num_gpus_per_node": "8", "num_gpus_per_node": "8"}
    config = resolve(argv(**flags, **PP2, **{CHUNK: "1"}, **EP2)).config
    assert config.parallel_sizes == ParallelSizes(tp=2, pp=2, ep=2, etp=1, dp=2, sequence_parallel=True)
    assert (config.least_micro_batches, virtual_stages(config), config.sharers_of_experts) == (2, 2, 2)
    config = resolve(argv(**flags, context_parallel_size="2")).config
    assert config.parallel_sizes == ParallelSizes(tp=2, cp=2, etp=2, dp=2, sequence_parallel=True)
    assert (config.least_micro_batches, virtual_stages(config)) == (1, None)
