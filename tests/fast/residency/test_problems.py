"""Which policies the planner refuses, and with which words."""

import itertools
from dataclasses import replace

import pytest

from miles.residency.plan import Phase, Place, Policy, Region, plan

BOTH = frozenset({Region.KV_CACHE, Region.WEIGHTS})
SETS_OF_LEVELS = [BOTH, frozenset({Region.KV_CACHE}), frozenset({Region.WEIGHTS}), frozenset()]
BOOL = (True, False)
ALL = [
    Policy(*values)
    for values in itertools.product(
        BOOL, BOOL, SETS_OF_LEVELS, (Place.HOST, Place.DISK), ("cpu", "gpu"), BOOL, BOOL, BOOL, BOOL, BOOL
    )
]
LEGAL = [policy for policy in ALL if not policy.problems()]


RULES = {
    "--colocate-memory-peak-device gpu interleaves": lambda p: (
        p.peak_device == "gpu" and not (p.offload_train and p.offload_rollout)
    ),
    "--colocate-memory-peak-device gpu does not work with a critic": lambda p: p.peak_device == "gpu" and p.critic,
    "--offload-train-target disk says": lambda p: p.target == "disk" and not p.offload_train,
    "--rematerialize-param-from-master-weight saves": lambda p: p.rematerialize and not p.offload_train,
    "--rematerialize-param-from-master-weight does not work with LoRA": lambda p: p.rematerialize and p.lora,
    "--rematerialize-param-from-master-weight does not work with --offload-train-target disk": lambda p: (
        p.rematerialize and p.target == "disk"
    ),
    "--rematerialize-param-from-master-weight does not work with --stream-optimizer-state-to-disk": lambda p: (
        p.rematerialize and p.stream_optimizer
    ),
    "--stream-optimizer-state-to-disk does not work with LoRA": lambda p: p.stream_optimizer and p.lora,
}


def test_every_illegal_combination_is_refused_with_each_of_its_reasons():
    for a_policy in ALL:
        reasons = [words for words, broken in RULES.items() if broken(a_policy)]
        problems = a_policy.problems()
        assert len(problems) == len(reasons)
        assert all(problem.startswith(words) for problem, words in zip(problems, reasons, strict=True)), problems
        if problems:
            with pytest.raises(ValueError) as error:
                plan(Phase.ENGINES_UP, a_policy)
            assert str(error.value) == "; ".join(problems)
    assert 300 < len(LEGAL) < len(ALL)


# What a remedy asks for, as the change of the policy that it is.
REMEDIES = {
    "--colocate-memory-peak-device cpu": {"peak_device": "cpu"},
    "add --offload-rollout": {"offload_rollout": True},
    "--offload-rollout-level kv_cache weight": {"levels": BOTH},
    "--offload-train-target disk and without --rematerialize": {"target": Place.DISK, "rematerialize": False},
    "--offload-train-target disk or": {"target": Place.DISK},
    "--bf16 --rematerialize-param-from-master-weight": {"rematerialize": True},
    "--stream-optimizer-state-to-disk": {"stream_optimizer": True},
}


def test_remedies_fit_the_policy_that_they_are_said_to():
    for policy in (policy for policy in LEGAL if policy.offload_train):
        for said in (policy.more_room_on_the_gpu(), *([policy.less_on_the_host()] if policy.target == "host" else [])):
            for words, change in REMEDIES.items():
                changed = replace(policy, **change)
                assert words not in said or (changed != policy and not changed.problems()), (policy, said)


def test_where_the_gpu_holds_both_sides_it_is_said_first():
    policy = Policy(True, True, BOTH, Place.HOST, "gpu")
    assert policy.more_room_on_the_gpu() == (
        "set --colocate-memory-peak-device cpu, where the engines' weights leave before it comes, or keep its "
        "optimizer on disk with --stream-optimizer-state-to-disk, or give it more GPUs"
    )
    assert "peak-device" not in replace(policy, peak_device="cpu").more_room_on_the_gpu()
    assert replace(policy, levels=frozenset(), stream_optimizer=True, peak_device="cpu").more_room_on_the_gpu() == (
        "let more of the engines leave with --offload-rollout-level kv_cache weight, or give it more GPUs"
    )
