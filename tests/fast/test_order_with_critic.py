"""The order of the driver with a critic: who comes, leaves, is trained, saved and sent, as test_order.py has it."""

import pytest

from tests.fast.recording_driver import driver, steps_of


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs `train.run` on the configuration of `flags`, with ppo; returns the calls."""
    run = driver(tmp_path, monkeypatch)
    return lambda flags, **more: run(f"{flags} --advantage-estimator ppo", **more)


SET_UP, CRITIC_ALONE, STEP = PPO = (
    """
    rollout leaves cuda_graph kv_cache weights
    trainer init, trainer leaves comm grads weights optimizer, critic init, critic leaves comm grads weights optimizer
    rollout engine_urls, trainer connect
    rollout returns weights, trainer update_weights 1, rollout returns kv_cache cuda_graph
    """,
    """
    rollout generate {id}
    rollout leaves cuda_graph kv_cache weights, critic returns optimizer weights grads comm
    critic train {id}
    critic leaves comm grads weights optimizer, rollout returns weights
    trainer update_weights {version}, rollout returns kv_cache cuda_graph
    """,
    """
    rollout generate {id}
    rollout leaves cuda_graph kv_cache weights, critic returns optimizer weights grads comm
    critic train {id}
    critic leaves comm grads weights optimizer, trainer returns optimizer weights grads comm
    trainer train {id}
    trainer leaves comm grads weights optimizer, rollout returns weights
    trainer update_weights {version}, rollout returns kv_cache cuda_graph
    """,
)
# Tensor parallelism: the sync gathers, also from an actor that sleeps through the step.
GATHERING = {
    "trainer leaves comm grads weights optimizer": "trainer leaves grads weights optimizer",
    "trainer returns optimizer weights grads comm": "trainer returns comm optimizer weights grads",
    "trainer update_weights 1": "trainer update_weights 1, trainer leaves comm",
    "trainer update_weights {version}": "trainer update_weights {version}, trainer leaves comm",
}


def gathering(text):
    for call, calls in GATHERING.items():
        text = text.replace(call, calls)
    return text


CRITIC_SLEEPS = "critic leaves comm grads weights optimizer"
PPO_TP = (
    gathering(SET_UP),
    gathering(CRITIC_ALONE).replace(CRITIC_SLEEPS, f"{CRITIC_SLEEPS}, trainer returns comm"),
    gathering(STEP),
)
# Nothing moves, and the engines keep what they have as long as the actor does.
PPO_STAYS = (
    """
    trainer init, critic init
    rollout engine_urls, trainer connect
    trainer update_weights 1
    """,
    "rollout generate {id}, critic train {id}",
    "rollout generate {id}, critic train {id}, trainer train {id}, trainer update_weights {version}",
)

LAYOUTS = {
    "--colocate": PPO,
    "--colocate --offload-train-target disk --offload-train-disk-dir .": PPO,
    "--colocate --tensor-model-parallel-size 2": PPO_TP,
    "--colocate --no-offload": PPO_STAYS,
    "--rollout-num-gpus 1": PPO_STAYS,
}


@pytest.mark.parametrize("flags", LAYOUTS)
@pytest.mark.parametrize("critic_only", [0, 1, 2])
async def test_all_calls_of_a_run(drive, flags, critic_only):
    set_up, critic_alone, step = LAYOUTS[flags]
    calls = steps_of(set_up, *[critic_alone] * critic_only, *[step] * (3 - critic_only))
    assert await drive(f"{flags} --num-critic-only-steps {critic_only}") == calls


async def test_a_critic_is_saved_before_it_leaves_and_the_actor_comes_for_its_save(drive, tmp_path):
    folder, critic_folder = tmp_path / "checkpoints", tmp_path / "checkpoints_critic"
    folder.mkdir()
    critic_folder.mkdir()
    # The second step trains the critic alone, but both are saved after it: the actor comes, and is not trained.
    critic_trained, actor_trained = "critic train {id}", "trainer train {id}"
    actor_saved = f"trainer save {{id}}, rollout save {folder}/.iter_000000{{id}}.partial"
    saved = STEP.replace(critic_trained, critic_trained + ", critic save {id}")
    untrained = saved.replace("    " + actor_trained, actor_saved)
    calls = steps_of(SET_UP, CRITIC_ALONE, untrained, saved.replace(actor_trained, f"{actor_trained}, {actor_saved}"))
    assert await drive("--colocate --num-critic-only-steps 2 --save checkpoints --save-interval 2") == calls
    for root in (folder, critic_folder):
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "2\n"


async def test_a_call_that_fails_ends_the_run_there(drive):
    calls = steps_of(SET_UP, CRITIC_ALONE, STEP, STEP)
    for position, line in enumerate(calls[1:], 1):
        made = []
        with pytest.raises(OSError, match=f"^{line}$"):
            await drive("--colocate --num-critic-only-steps 1", calls=made, fail_at=position)
        assert made == calls[:position]
