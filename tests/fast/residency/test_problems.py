"""Which policies the planner refuses, and with which words."""

import itertools

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
