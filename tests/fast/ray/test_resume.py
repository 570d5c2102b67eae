"""Where a run starts."""

import logging

import pytest

from miles.config import RunConfig
from miles.ray.resume import first_rollout, nothing_left, resumed
from miles.utils.checkpoint_folder import MANIFEST
from tests.fast.fake_checkpoint import save_fake


def config(**given):
    return RunConfig(**{"hf_checkpoint": "m", "rollout_batch_size": 8, "num_rollout": 5} | given)


def test_the_checkpoint_is_looked_for_once(tmp_path):
    new = resumed(config(load=str(tmp_path)))
    assert (new.load, new.ckpt_step, first_rollout(new), nothing_left(new)) == (None, None, 0, None)
    save_fake(tmp_path, 1, 3)
    for given, step in (({}, 3), ({"ckpt_step": 1}, 1)):
        found = resumed(config(load=str(tmp_path), **given))
        assert (found.load, found.ckpt_step, first_rollout(found)) == (str(tmp_path), step, step + 1)
        assert resumed(found) == found
    assert first_rollout(resumed(config(load=str(tmp_path), start_rollout_id=2))) == 2
    # Without a trainer nobody loads anything.
    alone = resumed(config(load=str(tmp_path), debug_rollout_only=True))
    assert (alone.load, first_rollout(alone)) == (None, 0)
    with pytest.raises(ValueError, match="no checkpoint iter_0000002"):
        resumed(config(load=str(tmp_path), ckpt_step=2))


def test_a_finished_run_has_nothing_left(tmp_path):
    save_fake(tmp_path, 4)
    finished = resumed(config(load=str(tmp_path)))
    assert nothing_left(finished).startswith(
        f"nothing to do: this run of 5 rollouts is finished, {tmp_path}/iter_0000004 "
    )
    longer = {"num_rollout": 6}, {"num_rollout": 0}, {"num_rollout": None, "num_epoch": 1}
    assert not any(nothing_left(finished.model_copy(update=update)) for update in longer)
    assert "--start-rollout-id 7 is behind the last of 5 rollouts, 4" in nothing_left(config(start_rollout_id=7))


def test_actor_and_critic_are_of_one_rollout(tmp_path, caplog):
    actor, critic = tmp_path / "actor", tmp_path / "critic"
    ppo = {"advantage_estimator": "ppo", "load": str(actor), "critic_load": str(critic)}
    save_fake(actor, 1, 3)
    with caplog.at_level(logging.WARNING):
        assert resumed(config(**ppo)).critic_load is None
    assert f"no checkpoint in {critic}: beside the actor of {actor}/iter_0000003 the critic is a new one" in caplog.text
    save_fake(critic, 1, 3, rollout=False)
    assert (resumed(config(**ppo)).ckpt_step, resumed(config(**ppo)).critic_load) == (3, str(critic))
    (critic / "iter_0000003" / "model" / "__0_0.distcp").unlink()
    assert resumed(config(**ppo)).ckpt_step == 1


def test_a_reference_that_may_have_moved_is_missed(tmp_path, caplog):
    """Where there is no list of files, nothing says whether there was one."""
    save_fake(tmp_path, 3)
    given = {"load": str(tmp_path), "use_kl_loss": True, "ref_load": "r"}
    (tmp_path / "iter_0000003" / MANIFEST).unlink()
    for interval, warns in ((5, False), (4, True)):
        caplog.clear()
        resumed(config(**given, ref_update_interval=interval))
        assert ("has no reference/: the reference is that of --ref-load" in caplog.text) == warns
