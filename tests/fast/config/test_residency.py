"""From a configuration to the policy of its moves."""

import pytest

from miles.config import RunConfig
from miles.config.residency import policy_of
from miles.config.values import Undetermined, Values
from miles.residency.plan import Place, Policy, Region

BOTH = {"offload_train": True, "offload_rollout": True}


def config_of(**given):
    return RunConfig(**({"hf_checkpoint": "m", "rollout_batch_size": 8, "actor_num_gpus_per_node": 4} | BOTH | given))


def policy(**given):
    default = {"levels": frozenset({Region.KV_CACHE, Region.WEIGHTS}), "target": Place.HOST, "peak_device": "cpu"}
    return Policy(**(default | BOTH | given))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"offload_train": False}, {"offload_train": False}),
        ({"offload_rollout": False}, {"offload_rollout": False}),
        ({"offload_rollout_level": ["weight"]}, {"levels": frozenset({Region.WEIGHTS})}),
        ({"offload_rollout_level": ["kv_cache"]}, {"levels": frozenset({Region.KV_CACHE})}),
        ({"offload_rollout_level": []}, {"levels": frozenset()}),
        ({"offload_train_target": "disk"}, {"target": Place.DISK}),
        ({"colocate_memory_peak_device": "gpu"}, {"peak_device": "gpu"}),
        ({"stream_optimizer_state_to_disk": True}, {"stream_optimizer": True}),
        ({"advantage_estimator": "ppo"}, {"critic": True}),
        ({"tensor_model_parallel_size": 2}, {"sync_gathers": True}),
        ({"pipeline_model_parallel_size": 2}, {"sync_gathers": True}),
        ({"rematerialize_param_from_master_weight": True}, {"rematerialize": True, "sync_gathers": True}),
        (
            {"rematerialize_param_from_master_weight": True, "actor_num_gpus_per_node": 1},
            {"rematerialize": True, "sync_gathers": False},
        ),
    ],
)
def test_each_flag_reaches_the_policy(given, expected):
    config = config_of(**given)
    assert policy_of(config) == policy_of(Values(dict(config))) == policy(**expected)


def test_an_unknown_value_leaves_the_policy_undetermined():
    known = dict(config_of())
    del known["offload_train_target"]
    with pytest.raises(Undetermined):
        policy_of(Values(known))
