"""The rules of the engines' flags, broken once each, and the layouts they allow."""

import pytest

from miles.config.engine_rules import ENGINE_RULES
from miles.config.resolve import ConfigError, resolve

ALONE = {"colocate": None, "rollout_num_gpus": "4"}
EXTERNAL = {"colocate": None, "rollout_external_engine_addrs": "10.0.0.7:30000 10.0.0.8:30000"}
CASES = {
    "_engine_gpus": [
        ({**ALONE, "rollout_num_gpus_per_engine": "4", "num_gpus_per_node": "2", "actor_num_gpus_per_node": "2"},
         "--rollout-num-gpus-per-engine 4 does not fit on a node of --num-gpus-per-node 2"),
        ({"colocate": None}, "--rollout-num-gpus is not given, but the engines need GPUs of their own"),
        ({"colocate": None, "rollout_num_gpus": "0"}, "share the trainer's with --colocate"),
        ({"rollout_num_gpus": "3"}, "--rollout-num-gpus 3 contradicts --colocate, which gives the engines"),
        ({"colocate": None, "rollout_num_gpus": "3", "rollout_num_gpus_per_engine": "2"}, "1 would be left over"),
        ({"rollout_num_gpus": "9", "rollout_num_gpus_per_engine": "2"}, "9 is no multiple of --rollout-num-gpus-per"),
        ({"actor_num_gpus_per_node": "3", "rollout_num_gpus": "4", "rollout_num_gpus_per_engine": "2"},
         "2 does not divide the trainer's 3 GPUs: with --colocate and --rollout-num-gpus 4, an engine would share"),
    ],
    "_external_engines": [
        ({"rollout_external": ""}, "--rollout-external needs --rollout-external-engine-addrs"),
        ({**EXTERNAL, "no_rollout_external": "", "rollout_num_gpus": "2"}, "has no effect with --no-rollout-external"),
        ({**EXTERNAL, "rollout_external_engine_addrs": "http://a:1"}, "http://a:1 must be host:port"),
        ({**EXTERNAL, "rollout_external_engine_addrs": "a:70000"}, "a:70000 must be host:port"),
        ({**EXTERNAL, "rollout_external_engine_addrs": "a"}, "--rollout-external-engine-addrs a must be host:port"),
        ({**EXTERNAL, "rollout_external_engine_addrs": "a:1 a:1"}, "names a:1 more than once"),
        ({**EXTERNAL, "colocate": ""}, "--rollout-external with --colocate: whoever runs the engines chose their GPUs"),
        ({**EXTERNAL, "rollout_num_gpus": "3"}, "--rollout-num-gpus 3 is not 2 external engines times"),
        ({**EXTERNAL, "sglang_page_size": "1"}, "--sglang-page-size has no effect on engines that run already"),
    ],
    "_engine_parallel_sizes": [
        ({"sglang_pp_size": "0"}, "--sglang-pp-size is 0; it is at least 1"),
        ({"sglang_pp_size": "3"}, "--sglang-pp-size 3 does not divide --rollout-num-gpus-per-engine 1"),
        ({"sglang_pp_size": "2", "rollout_num_gpus_per_engine": "2"}, "new weights reach one pipeline stage"),
        ({"sglang_ep_size": "2"}, "--sglang-ep-size 2 does not divide the 1 tensor-parallel ranks of an engine"),
        ({"sglang_dp_size": "2"}, "--sglang-dp-size 2 without --sglang-enable-dp-attention would be 2 engines in one"),
        ({"sglang_enable_dp_attention": ""}, "--sglang-enable-dp-attention needs --device cuda"),
        ({"sglang_enable_dp_attention": "", "sglang_dp_size": "2", "device": "cuda"},
         "--sglang-dp-size 2 does not divide the 1 tensor-parallel ranks"),
        ({"rollout_num_gpus_per_engine": "8", "actor_num_gpus_per_node": "8"},
         "--rollout-num-gpus-per-engine 8 does not divide the model's num_attention_heads 4 among the 8 ranks"),
    ],
    "_quantized_engines": [
        ({"sglang_quantization": "fp8"}, "--sglang-quantization fp8: SGLang quantises weights when it starts"),
    ],
    "_speculation": [
        ({"sglang_speculative_algorithm": "EAGLE"}, "--sglang-speculative-algorithm EAGLE: its draft model gets no"),
        ({**ALONE, "sglang_speculative_algorithm": "standalone"}, "drop it, or give NGRAM, which has none"),
    ],
    "_router": [
        ({"sglang_router_ip": "10.0.0.9"}, "--sglang-router-ip needs --sglang-router-port too"),
        ({"sglang_router_port": "1"}, "--sglang-router-port needs --sglang-router-ip too"),
        ({"sglang_router_ip": "10.0.0.9", "sglang_router_port": "1", "sglang_router_policy": "random"},
         "--sglang-router-policy random is for a router that Miles starts"),
        ({"sglang_router_policy": "random", "sglang_router_request_timeout_secs": "9", "rollout_request_timeout": "99"},
         "--sglang-router-request-timeout-secs 9 is below --rollout-request-timeout 99"),
    ],
}  # fmt: skip


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in ENGINE_RULES]


@pytest.mark.parametrize(("changes", "expected"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(expected in problem for problem in caught.value.problems) == 1, caught.value.problems


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


def test_a_timeout_of_a_router_that_is_not_started_is_pointed_out(argv):
    (warning,) = resolve(argv("--sglang-router-request-timeout-secs 100")).warnings
    assert warning == "--sglang-router-request-timeout-secs 100 has no effect without --sglang-router-policy"
    assert resolve(argv("--sglang-router-policy round_robin")).warnings == []
