"""The tables of the planner, written out."""

import pytest

from miles.residency.plan import (
    Clear,
    Move,
    Party,
    Phase,
    Place,
    Policy,
    Region,
    Sync,
    plan,
)

ACTOR, CRITIC, ENGINE = Party
KV, WEIGHTS = Region.KV_CACHE, Region.WEIGHTS
BOTH = frozenset({KV, WEIGHTS})


def policy(peak="cpu", levels=BOTH, train=True, rollout=True, target=Place.HOST, **others):
    return Policy(train, rollout, frozenset(levels), target, peak, **others)


def text(steps):
    """One string for each Clear, Sync and run of moves of a party: "actor -grads>dropped -weights>host"."""
    lines = []
    for step in steps:
        match step:
            case Clear(party):
                lines.append(f"{party} clear")
            case Sync():
                lines.append("sync")
            case Move(party, region, source, target):
                word = f"-{region}>{target}" if source == Place.GPU else f"+{region}<{source}"
                assert Place.GPU in (source, target)
                if lines and lines[-1].split()[0] == party and "clear" not in lines[-1]:
                    lines[-1] += f" {word}"
                else:
                    lines.append(f"{party} {word}")
    return lines


# What leaves and returns, in the words of `text`.
ENGINE_OUT = "engine -cuda_graph>dropped -kv_cache>dropped -weights>dropped"
POOLS_OUT = "engine -cuda_graph>dropped -kv_cache>dropped"
POOLS_IN = "engine +kv_cache<dropped +cuda_graph<dropped"
WEIGHTS_OUT = "engine -weights>dropped"
WEIGHTS_IN = "engine +weights<dropped"
GRAPH_OUT = "engine -cuda_graph>dropped"
GRAPH_IN = "engine +cuda_graph<dropped"
SLEEP = "actor -comm>dropped -grads>dropped -weights>host -optimizer>host"
WAKE = "actor +optimizer<host +weights<host +grads<dropped +comm<dropped"
CRITIC_SLEEP, CRITIC_WAKE = SLEEP.replace("actor", "critic"), WAKE.replace("actor", "critic")
LORA_WAKE = "actor +optimizer<host +weights<host +comm<dropped +grads<dropped"
# Where the sync gathers, the groups outlast the sleep.
DOZE = "actor -grads>dropped -weights>host -optimizer>host"
COMM_OUT = "actor -comm>dropped"
COMM_IN = "actor +comm<dropped"
COMM_WAKE = "actor +comm<dropped +optimizer<host +weights<host +grads<dropped"

TABLES = {
    "cpu": (
        policy(),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT, WAKE],
            Phase.AFTER_TRAIN: [SLEEP, WEIGHTS_IN, "sync", POOLS_IN],
        },
    ),
    "gpu": (
        policy("gpu"),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: ["sync", POOLS_IN],
            Phase.AFTER_GENERATE: [POOLS_OUT, WAKE, WEIGHTS_OUT],
            Phase.AFTER_TRAIN: ["actor clear", WEIGHTS_IN, SLEEP, "sync", POOLS_IN],
        },
    ),
    "gpu, disk": (
        policy("gpu", target=Place.DISK),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: ["actor -comm>dropped -grads>dropped -weights>disk -optimizer>disk"],
            Phase.FIRST_SYNC: ["sync", POOLS_IN],
            Phase.AFTER_GENERATE: [
                POOLS_OUT,
                "actor +optimizer<disk +weights<disk +grads<dropped +comm<dropped",
                WEIGHTS_OUT,
            ],
            Phase.AFTER_TRAIN: [
                "actor clear",
                WEIGHTS_IN,
                "actor -comm>dropped -grads>dropped -weights>disk -optimizer>disk",
                "sync",
                POOLS_IN,
            ],
        },
    ),
    "cpu, only the kv cache": (
        policy(levels={KV}),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: ["sync", POOLS_IN],
            Phase.AFTER_GENERATE: [POOLS_OUT, WAKE],
            Phase.AFTER_TRAIN: [SLEEP, "sync", POOLS_IN],
        },
    ),
    "cpu, only the weights": (
        policy(levels={WEIGHTS}),
        {
            Phase.ENGINES_UP: ["engine -cuda_graph>dropped -weights>dropped"],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", GRAPH_IN],
            Phase.AFTER_GENERATE: ["engine -cuda_graph>dropped -weights>dropped", WAKE],
            Phase.AFTER_TRAIN: [SLEEP, WEIGHTS_IN, "sync", GRAPH_IN],
        },
    ),
    "cpu, no level": (
        policy(levels=()),
        {
            Phase.ENGINES_UP: [GRAPH_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: ["sync", GRAPH_IN],
            Phase.AFTER_GENERATE: [GRAPH_OUT, WAKE],
            Phase.AFTER_TRAIN: [SLEEP, "sync", GRAPH_IN],
        },
    ),
    "gpu, only the kv cache": (
        policy("gpu", levels={KV}),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: ["sync", POOLS_IN],
            Phase.AFTER_GENERATE: [POOLS_OUT, WAKE],
            Phase.AFTER_TRAIN: ["actor clear", SLEEP, "sync", POOLS_IN],
        },
    ),
    "gpu, only the weights": (
        policy("gpu", levels={WEIGHTS}),
        {
            Phase.ENGINES_UP: [GRAPH_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: ["sync", GRAPH_IN],
            Phase.AFTER_GENERATE: [GRAPH_OUT, WAKE, WEIGHTS_OUT],
            Phase.AFTER_TRAIN: ["actor clear", WEIGHTS_IN, SLEEP, "sync", GRAPH_IN],
        },
    ),
    "gpu, no level": (
        policy("gpu", levels=()),
        {
            Phase.ENGINES_UP: [GRAPH_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: ["sync", GRAPH_IN],
            Phase.AFTER_GENERATE: [GRAPH_OUT, WAKE],
            Phase.AFTER_TRAIN: ["actor clear", SLEEP, "sync", GRAPH_IN],
        },
    ),
    "cpu, LoRA": (
        policy(lora=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: ["actor -grads>dropped -comm>dropped -weights>host -optimizer>host"],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT, LORA_WAKE],
            Phase.AFTER_TRAIN: [
                "actor -grads>dropped -comm>dropped -weights>host -optimizer>host",
                WEIGHTS_IN,
                "sync",
                POOLS_IN,
            ],
        },
    ),
    "gpu, LoRA": (
        policy("gpu", lora=True),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: ["actor -grads>dropped -comm>dropped -weights>host -optimizer>host"],
            Phase.FIRST_SYNC: ["sync", POOLS_IN],
            Phase.AFTER_GENERATE: [POOLS_OUT, LORA_WAKE, WEIGHTS_OUT],
            Phase.AFTER_TRAIN: [
                "actor clear",
                "actor -grads>dropped",
                WEIGHTS_IN,
                "actor -comm>dropped -weights>host -optimizer>host",
                "sync",
                POOLS_IN,
            ],
        },
    ),
    "cpu, critic": (
        policy(critic=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.CRITIC_BUILT: [CRITIC_SLEEP],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT, CRITIC_WAKE],
            Phase.AFTER_CRITIC: [CRITIC_SLEEP, WAKE],
            Phase.AFTER_CRITIC_ONLY: [CRITIC_SLEEP, WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_TRAIN: [SLEEP, WEIGHTS_IN, "sync", POOLS_IN],
        },
    ),
    "cpu, critic, the engine's weights stay": (
        policy(critic=True, sync_gathers=True, levels={KV}),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: [DOZE],
            Phase.CRITIC_BUILT: [CRITIC_SLEEP],
            Phase.FIRST_SYNC: ["sync", COMM_OUT, POOLS_IN],
            Phase.AFTER_GENERATE: [POOLS_OUT, CRITIC_WAKE],
            Phase.AFTER_CRITIC: [CRITIC_SLEEP, COMM_WAKE],
            # Nothing to send: the actor learned nothing, and the engine has its weights.
            Phase.AFTER_CRITIC_ONLY: [CRITIC_SLEEP, POOLS_IN],
            Phase.AFTER_TRAIN: [DOZE, "sync", COMM_OUT, POOLS_IN],
        },
    ),
    "cpu, rematerialise": (
        policy(rematerialize=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: ["actor -weights>dropped -comm>dropped -grads>dropped -optimizer>host"],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_GENERATE: [
                ENGINE_OUT,
                "actor +optimizer<host +grads<dropped +comm<dropped +weights<dropped",
            ],
            Phase.AFTER_TRAIN: [
                "actor -weights>dropped -comm>dropped -grads>dropped -optimizer>host",
                WEIGHTS_IN,
                "sync",
                POOLS_IN,
            ],
        },
    ),
    "cpu, disk, streamed optimizer": (
        policy(target=Place.DISK, stream_optimizer=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: ["actor -comm>dropped -grads>dropped -weights>disk"],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT, "actor +weights<disk +grads<dropped +comm<dropped"],
            Phase.AFTER_TRAIN: [
                "actor -comm>dropped -grads>dropped -weights>disk",
                WEIGHTS_IN,
                "sync",
                POOLS_IN,
            ],
        },
    ),
    "cpu, the sync gathers": (
        policy(sync_gathers=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: [DOZE],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", COMM_OUT, POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT, COMM_WAKE],
            Phase.AFTER_TRAIN: [DOZE, WEIGHTS_IN, "sync", COMM_OUT, POOLS_IN],
        },
    ),
    "gpu, the sync gathers": (
        policy("gpu", sync_gathers=True),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: [DOZE],
            Phase.FIRST_SYNC: ["sync", COMM_OUT, POOLS_IN],
            Phase.AFTER_GENERATE: [POOLS_OUT, COMM_WAKE, WEIGHTS_OUT],
            Phase.AFTER_TRAIN: ["actor clear", WEIGHTS_IN, DOZE, "sync", COMM_OUT, POOLS_IN],
        },
    ),
    "gpu, LoRA, the sync gathers": (
        policy("gpu", lora=True, sync_gathers=True),
        {
            Phase.ENGINES_UP: [POOLS_OUT],
            Phase.TRAINER_BUILT: [DOZE],
            Phase.FIRST_SYNC: ["sync", COMM_OUT, POOLS_IN],
            Phase.AFTER_GENERATE: [POOLS_OUT, COMM_WAKE, WEIGHTS_OUT],
            Phase.AFTER_TRAIN: [
                "actor clear",
                "actor -grads>dropped",
                WEIGHTS_IN,
                "actor -weights>host -optimizer>host",
                "sync",
                COMM_OUT,
                POOLS_IN,
            ],
        },
    ),
    "cpu, rematerialise, the sync gathers": (
        policy(rematerialize=True, sync_gathers=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: ["actor -weights>dropped -grads>dropped -optimizer>host"],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", COMM_OUT, POOLS_IN],
            Phase.AFTER_GENERATE: [
                ENGINE_OUT,
                "actor +comm<dropped +optimizer<host +grads<dropped +weights<dropped",
            ],
            Phase.AFTER_TRAIN: [
                "actor -weights>dropped -grads>dropped -optimizer>host",
                WEIGHTS_IN,
                "sync",
                COMM_OUT,
                POOLS_IN,
            ],
        },
    ),
    # The critic sends no weights: its groups leave when it sleeps.
    "cpu, critic, the sync gathers": (
        policy(critic=True, sync_gathers=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.TRAINER_BUILT: [DOZE],
            Phase.CRITIC_BUILT: [CRITIC_SLEEP],
            Phase.FIRST_SYNC: [WEIGHTS_IN, "sync", COMM_OUT, POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT, CRITIC_WAKE],
            Phase.AFTER_CRITIC: [CRITIC_SLEEP, COMM_WAKE],
            Phase.AFTER_CRITIC_ONLY: [CRITIC_SLEEP, COMM_IN, WEIGHTS_IN, "sync", COMM_OUT, POOLS_IN],
            Phase.AFTER_TRAIN: [DOZE, WEIGHTS_IN, "sync", COMM_OUT, POOLS_IN],
        },
    ),
    "only the trainer, the sync gathers": (
        policy(rollout=False, sync_gathers=True),
        {
            Phase.TRAINER_BUILT: [DOZE],
            Phase.FIRST_SYNC: ["sync", COMM_OUT],
            Phase.AFTER_GENERATE: [COMM_WAKE],
            Phase.AFTER_TRAIN: [DOZE, "sync", COMM_OUT],
        },
    ),
    "only the trainer": (
        policy(rollout=False),
        {
            Phase.TRAINER_BUILT: [SLEEP],
            Phase.FIRST_SYNC: ["sync"],
            Phase.AFTER_GENERATE: [WAKE],
            Phase.AFTER_TRAIN: [SLEEP, "sync"],
        },
    ),
    "only the engines": (
        policy(train=False),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.FIRST_SYNC: ["actor clear", WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT],
            Phase.AFTER_TRAIN: ["actor clear", WEIGHTS_IN, "sync", POOLS_IN],
        },
    ),
    "only the engines, critic, the sync gathers": (
        policy(train=False, critic=True, sync_gathers=True),
        {
            Phase.ENGINES_UP: [ENGINE_OUT],
            Phase.FIRST_SYNC: ["actor clear", "critic clear", WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_GENERATE: [ENGINE_OUT],
            Phase.AFTER_CRITIC_ONLY: ["actor clear", "critic clear", WEIGHTS_IN, "sync", POOLS_IN],
            Phase.AFTER_TRAIN: ["actor clear", "critic clear", WEIGHTS_IN, "sync", POOLS_IN],
        },
    ),
    "nobody": (policy(train=False, rollout=False), {Phase.FIRST_SYNC: ["sync"], Phase.AFTER_TRAIN: ["sync"]}),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    a_policy, table = TABLES[name]
    assert {phase: text(plan(phase, a_policy)) for phase in Phase} == {phase: table.get(phase, []) for phase in Phase}
