"""Every rule of Megatron's flags, broken once."""

import pytest

from miles.config.megatron_rules import MEGATRON_RULES
from miles.config.resolve import ConfigError, resolve

CASES = {
    "_recompute": [
        ({"recompute_method": "block"}, "add --recompute-granularity full, or drop it"),
        ({"recompute_modules": "mlp"}, "add --recompute-granularity selective, or drop it"),
        ({"recompute_granularity": "selective", "recompute_num_layers": "1"},
         "--recompute-num-layers is for --recompute-granularity full, not selective; drop it"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "1",
          "recompute_modules": "mlp"}, "--recompute-modules is for --recompute-granularity selective, not full"),
        ({"recompute_granularity": "selective", "recompute_modules": "mlp layernorm"},
         "--recompute-modules layernorm needs --transformer-impl transformer_engine, it is local; drop layernorm"),
        ({"recompute_granularity": "full", "recompute_num_layers": "1"}, "needs --recompute-method: give uniform or"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "needs --recompute-num-layers: give a number"),
    ],
    "_overlap": [
        ({"overlap_param_gather": "", "no_use_distributed_optimizer": ""}, "only the distributed optimizer makes"),
        ({"overlap_param_gather": ""}, "--overlap-param-gather needs --overlap-grad-reduce too; add it"),
        ({"overlap_param_gather": "", "overlap_grad_reduce": "", "stream_optimizer_state_to_disk": ""},
         "--overlap-param-gather is not possible with --stream-optimizer-state-to-disk"),
    ],
    "_transformer_engine": [
        ({"transformer_impl": "transformer_engine"}, "needs a GPU and --device is cpu; use --transformer-impl local"),
        ({"transformer_impl": "transformer_engine", "device": "cuda", "no_bf16": ""}, "add --bf16, or use local"),
        ({"fp8_format": "hybrid"}, "--fp8-format hybrid needs --transformer-impl transformer_engine, it is local"),
        ({"fp8_format": "hybrid", "data_pad_size_multiplier": "8"}, "a multiple of 16 tokens: --data-pad-size-multip"),
    ],
    "_router_losses": [
        ({"moe_aux_loss_coeff": "0.1"}, "--moe-aux-loss-coeff 0.1 weighs a loss and --moe-router-load-balancing"),
        ({"moe_router_load_balancing_type": "aux_loss"}, "has no effect with --moe-aux-loss-coeff 0; give a"),
        ({"moe_token_dispatcher_type": "allgather", "pipeline_model_parallel_size": "2"},
         "(--pipeline-model-parallel-size 2); use alltoall"),
    ],
}  # fmt: skip


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in MEGATRON_RULES]


@pytest.mark.parametrize(("changes", "expected"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(expected in problem for problem in caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "2"},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": "mlp moe"},
        {"overlap_grad_reduce": "", "overlap_param_gather": ""},
    ],
)
def test_taken(argv, changes):
    resolve(argv(**changes))


def test_swiglu_is_compiled_on_a_gpu_only(argv):
    assert not resolve(argv()).config.bias_swiglu_fusion
    assert resolve(argv(device="cuda")).config.bias_swiglu_fusion
