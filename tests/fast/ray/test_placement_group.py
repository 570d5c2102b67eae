import itertools
import random
import time

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from miles.ray import placement_group as placing
from miles.ray.cluster import num_bundles
from miles.ray.placement_group import ENGINE_SHARE, TRAINER_SHARE, Bundle, assign, create_placement_groups
from miles.utils.arguments import parse_args

pytestmark = pytest.mark.real

COLOCATE = ("--colocate", "--no-offload-train", "--no-offload-rollout")
PAIRS, FOURS = (("--rollout-num-gpus-per-engine", size) for size in "24")
CPUS = 4  # of the tests' Ray

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def layout(tiny_checkpoint, prompt_file):
    """Builds the configuration of a layout: `layout(trainer_ranks, *flags)`."""

    def build(ranks, *flags, device="cpu"):
        return parse_args(
            [
                *("--device", device, "--hf-checkpoint", str(tiny_checkpoint), "--prompt-data", str(prompt_file)),
                *("--label-key", "label", "--rm-type", "exact", "--num-rollout", "1", "--rollout-batch-size", "4"),
                *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "8"),
                *("--actor-num-gpus-per-node", str(ranks), *flags),
            ]
        )

    return build


class Neighbour:
    def place(self):
        return ray.util.get_current_placement_group().id


LAYOUTS = {
    "colocated": (2, COLOCATE, [0, 1], [[0], [1]]),
    "colocated and more": (2, (*COLOCATE, "--rollout-num-gpus", "4", *PAIRS), [0, 1], [[0, 1], [2, 3]]),
    "split": (2, ("--rollout-num-gpus", "2"), [0, 1], [[2], [3]]),
    "external": (2, ("--rollout-external-engine-addrs", "10.0.0.7:1", "10.0.0.7:2"), [0, 1], []),
    "train only": (2, ("--loss-type", "sft_loss"), [0, 1], []),
    "rollout only": (2, ("--debug-rollout-only", "--rollout-num-gpus", "4", *PAIRS), [], [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_who_sits_where(layout, name):
    ranks, flags, trainer, engines = LAYOUTS[name]
    config = layout(ranks, *flags)
    bundles = len({*trainer, *itertools.chain(*engines)})
    assert num_bundles(config) == bundles
    placement = create_placement_groups(config)
    try:
        assert [bundle.index for bundle in placement.trainer] == trainer
        assert [[bundle.index for bundle in engine] for engine in placement.engines] == engines
        assert placement.group.bundle_count == bundles
        here = ray.util.get_node_ip_address()
        assert {(b.node_ip, b.gpu_id) for b in itertools.chain(placement.trainer, *placement.engines)} == {(here, None)}
    finally:
        placement.remove()


def test_ranks_of_actor_and_critic_and_an_engine_share_a_bundle(layout):
    placement = create_placement_groups(layout(1, *COLOCATE))
    actors = [
        ray.remote(Neighbour).options(**placement.options(side[0], share)).remote()
        for side, share in (
            (placement.trainer, TRAINER_SHARE),
            (placement.trainer, TRAINER_SHARE),
            (placement.engines[0], ENGINE_SHARE),
        )
    ]
    places = ray.get([actor.place.remote() for actor in actors], timeout=60)
    assert places == [placement.group.id] * 3
    placement.remove()


def test_bundles_are_ordered_by_node_and_then_by_gpu_as_numbers():
    expected = [
        Bundle(5, "9.0.0.200", 0),
        Bundle(3, "10.0.0.9", 2),
        Bundle(0, "10.0.0.9", 10),
        Bundle(4, "10.0.0.10", 0),
        Bundle(2, "10.0.0.10", 1),
        Bundle(1, "10.0.0.10", 11),
    ]
    for seed in range(5):
        mixed = random.Random(seed).sample(expected, len(expected))
        assert sorted(mixed, key=placing._rank_order) == expected
    on_cpus = [Bundle(index, ip, None) for ip in ("10.0.0.9", "10.0.0.10") for index in (2, 10)]
    assert sorted(reversed(on_cpus), key=placing._rank_order) == on_cpus
    v6 = [Bundle(0, "fe80::9", 0), Bundle(0, "fe80::10", 0)]
    assert sorted(reversed(v6), key=placing._rank_order) == v6


NODES = {
    # GPUs of each node, trainer ranks, flags; the node and the GPUs of each engine, and those of the trainer
    "engines behind the trainer": ([8], 4, ("--rollout-num-gpus", "4", *PAIRS), ["A45", "A67"], "A0 A1 A2 A3"),
    "an engine of a whole node": ([4, 2], 2, ("--rollout-num-gpus", "4", *FOURS), ["A0123"], "B0 B1"),
    "engines of the last nodes": ([3, 3], 2, ("--rollout-num-gpus", "4", *PAIRS), ["A12", "B12"], "A0 B0"),
    "colocated and more": (
        [4, 2],
        4,
        (*COLOCATE, "--rollout-num-gpus", "6", *PAIRS),
        ["A01", "A23", "B01"],
        "A0 A1 A2 A3",
    ),
    "colocated across": ([3, 1], 4, (*COLOCATE, *PAIRS), None, "3 on 10.0.0.9, 1 on 10.0.0.10"),
    "no node is large enough": ([3, 3], 2, ("--rollout-num-gpus", "4", *FOURS), None, "3 on 10.0.0.9, 3 on 10.0.0.10"),
}


@pytest.mark.parametrize("name", NODES)
def test_an_engine_is_on_one_node(layout, name):
    nodes, ranks, flags, engines, trainer = NODES[name]
    ips = {"A": "10.0.0.9", "B": "10.0.0.10"}
    bundles = [Bundle(10, ip, gpu) for ip, size in zip(ips.values(), nodes, strict=False) for gpu in range(size)]
    config = layout(ranks, *flags, device="cuda")
    assert len(bundles) == num_bundles(config)
    if engines is None:
        with pytest.raises(ValueError, match=rf"an engine would span nodes: .* reserved ones are {trainer};"):
            assign(config, tuple(bundles))
        return
    placed = assign(config, tuple(bundles))
    assert [(b.node_ip, b.gpu_id) for b in placed[0]] == [(ips[word[0]], int(word[1])) for word in trainer.split()]
    assert [[(b.node_ip, b.gpu_id) for b in engine] for engine in placed[1]] == [
        [(ips[word[0]], int(gpu)) for gpu in word[1:]] for word in engines
    ]


def test_servers_listen_where_they_must(layout, monkeypatch):
    near = layout(1, "--rollout-num-gpus", "1")
    far = layout(1, "--rollout-num-gpus", "1", "--sglang-router-ip", "10.0.0.9", "--sglang-router-port", "30000")
    assert [placing._address(config, "10.0.0.7") for config in (near, far)] == ["127.0.0.1", "10.0.0.7"]
    nodes = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert placing._address(near, "10.0.0.7") == "127.0.0.1"
    nodes.append({"Alive": True})
    assert placing._address(near, "10.0.0.7") == "10.0.0.7"


def test_a_layout_larger_than_the_cluster_is_refused_at_once(layout):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"needs 5 CPUs \(trainer 1 x 2 \+ rollout 3\), the Ray cluster has 4: lower"):
        create_placement_groups(layout(2, "--rollout-num-gpus", "3"))
    with pytest.raises(ValueError, match=r"needs 8 CPUs \(trainer 1 x 8 shared with rollout 8\)"):
        create_placement_groups(layout(8, *COLOCATE))
    assert time.monotonic() - start < 5


def test_without_gpus_the_cpu_is_suggested(layout):
    with pytest.raises(ValueError, match="needs 1 GPUs .*the Ray cluster has 0.*run with --device cpu"):
        create_placement_groups(layout(1, *COLOCATE, device="cuda"))


def test_a_busy_cluster_is_reported_and_its_request_withdrawn(layout, monkeypatch):
    monkeypatch.setattr(placing, "PLACEMENT_TIMEOUT_S", 2.0)
    taken = placement_group([{"CPU": 1}] * 3)
    assert taken.wait(30)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"2 bundles of .*within 2 s: free now are 1 CPUs and 0 GPUs; another job"):
        create_placement_groups(layout(2, *COLOCATE))
    assert time.monotonic() - start < 10
    remove_placement_group(taken)
    # Nothing is still queued that could take the freed CPUs.
    everything = placement_group([{"CPU": 1}] * CPUS)
    assert everything.wait(30)
    remove_placement_group(everything)
