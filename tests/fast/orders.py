"""All calls of a run of three steps, for the main policies and schedules."""

from tests.fast.recording_driver import steps_of


def three_steps(set_up, step):
    """All calls of a run of three equal steps."""
    return steps_of(set_up, step, step, step)


CASES = {
    "--colocate": three_steps(
        """
        rollout leaves cuda_graph kv_cache weights
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        rollout returns weights, trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache weights, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer, rollout returns weights
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu": three_steps(
        """
        rollout leaves cuda_graph kv_cache
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache, trainer returns optimizer weights grads comm, rollout leaves weights
        trainer train {id}
        trainer clear_memory, rollout returns weights, trainer leaves comm grads weights optimizer
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --offload-rollout-level kv_cache": three_steps(
        """
        rollout leaves cuda_graph kv_cache
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --offload-rollout-level weight": three_steps(
        """
        rollout leaves cuda_graph weights
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        rollout returns weights, trainer update_weights 1, rollout returns cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph weights, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer, rollout returns weights
        trainer update_weights {version}, rollout returns cuda_graph
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu --offload-rollout-level": three_steps(
        """
        rollout leaves cuda_graph
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, rollout returns cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer clear_memory, trainer leaves comm grads weights optimizer
        trainer update_weights {version}, rollout returns cuda_graph
        """,
    ),
    "--colocate --no-offload-rollout": three_steps(
        """
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1
        """,
        """
        rollout generate {id}
        trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer, trainer update_weights {version}
        """,
    ),
    "--colocate --no-offload-train": three_steps(
        """
        rollout leaves cuda_graph kv_cache weights
        trainer init
        rollout engine_urls, trainer connect
        trainer clear_memory, rollout returns weights, trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache weights
        trainer train {id}
        trainer clear_memory, rollout returns weights
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --no-offload": three_steps(
        """
        trainer init
        rollout engine_urls, trainer connect
        trainer update_weights 1
        """,
        """
        rollout generate {id}
        trainer train {id}
        trainer update_weights {version}
        """,
    ),
    "--colocate --bf16 --rematerialize-param-from-master-weight": three_steps(
        """
        rollout leaves cuda_graph kv_cache weights
        trainer init, trainer leaves weights grads optimizer
        rollout engine_urls, trainer connect
        rollout returns weights, trainer update_weights 1, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache weights, trainer returns comm optimizer grads weights
        trainer train {id}
        trainer leaves weights grads optimizer, rollout returns weights
        trainer update_weights {version}, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu --tensor-model-parallel-size 2": three_steps(
        """
        rollout leaves cuda_graph kv_cache
        trainer init, trainer leaves grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache, trainer returns comm optimizer weights grads, rollout leaves weights
        trainer train {id}
        trainer clear_memory, rollout returns weights, trainer leaves grads weights optimizer
        trainer update_weights {version}, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
    ),
}
CPU = CASES["--colocate"]
GPU = CASES["--colocate --colocate-memory-peak-device gpu"]
CASES["--colocate --offload-train-target disk --offload-train-disk-dir ."] = CPU
CASES["--colocate --stream-optimizer-state-to-disk --offload-train-disk-dir ."] = [
    call.replace(" optimizer", "") for call in CPU
]
CASES["--colocate --colocate-memory-peak-device gpu --offload-train-target disk --offload-train-disk-dir ."] = GPU
CASES["--rollout-num-gpus 1"] = CASES["--colocate --no-offload"]
# Where a side is missing nothing moves and nothing is sent.
CASES["--colocate --debug-rollout-only"] = three_steps("", "rollout generate {id}")
CASES["--colocate --debug-train-only --loss-type sft_loss"] = CASES["--loss-type sft_loss"] = three_steps(
    "trainer init", "rollout generate {id}, trainer train {id}"
)


SPLIT_SET_UP = "trainer init, rollout engine_urls, trainer connect, trainer update_weights 1"
AHEAD = "--rollout-num-gpus 1 --one-step-ahead"
ASYNC = "--rollout-num-gpus 1 --fully-async"
CASES[AHEAD] = steps_of(
    SPLIT_SET_UP,
    "rollout generate 0, rollout generate 1, trainer train 0, trainer update_weights {version}",
    "rollout generate 2, trainer train 1, trainer update_weights {version}",
    "trainer train 2, trainer update_weights {version}",
)
CASES[f"{AHEAD} --update-weights-interval 2"] = steps_of(
    SPLIT_SET_UP,
    "rollout generate 0, rollout generate 1, trainer train 0",
    "rollout generate 2, trainer train 1, trainer update_weights {version}",
    "trainer train 2",
)
CASES[ASYNC] = three_steps(
    SPLIT_SET_UP.replace("trainer update_weights 1", "rollout hold, trainer update_weights 1, rollout release"),
    """
    rollout generate {id}, trainer train {id}
    rollout hold, trainer update_weights {version}, rollout release
    """,
)
# Without a trainer nothing is overlapped with, and without engines nothing is to be overlapped.
GENERATED_AHEAD = ("rollout generate 1", "rollout generate 2")
CASES[f"{AHEAD} --debug-rollout-only"] = steps_of(
    "", "rollout generate 0, rollout generate 1", "rollout generate 2", ""
)
CASES[f"{ASYNC} --debug-rollout-only"] = CASES["--colocate --debug-rollout-only"]
CASES["--one-step-ahead --loss-type sft_loss"] = CASES["--loss-type sft_loss"]
