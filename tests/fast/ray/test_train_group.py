"""What each rank is called with, and which checkpoint a critic continues from."""

import asyncio
import logging

import pytest

from miles.config import RunConfig
from miles.ray.train import group as group_module
from miles.ray.train.group import CriticGroup, TrainGroup, critic_config
from miles.utils.checkpoint_folder import checkpoint_folder, write_marker


@pytest.fixture
def calls(monkeypatch):
    """The calls that ranks get, as (class, rank, method, arguments); a critic's rank answers with its number."""
    made = []

    class Client:
        def __init__(self, path, config, rank, world_size, options):
            self.name, self.rank = path.rsplit(".", 1)[1], rank

        def __getattr__(self, method):
            async def call(*arguments):
                made.append((self.name, self.rank, method, arguments))
                await asyncio.sleep(0)
                metrics = {"train/loss": 1.0} if self.rank == 0 else {}
                return (metrics, f"values {self.rank}") if "Critic" in self.name else metrics

            return call

    monkeypatch.setattr(group_module, "ActorClient", Client)
    return made


def config(**given):
    base = {"device": "cpu", "hf_checkpoint": "m", "rollout_batch_size": 8, "advantage_estimator": "ppo"}
    return RunConfig(**base, critic_lr=0.5, **given)


async def test_each_rank_gets_its_shard_and_its_own_critics_values(calls):
    run = config(actor_num_gpus_per_node=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    options = [{}] * 8
    metrics, values = await CriticGroup(run, options).train(3, ["shard 0", "shard 1"])
    assert (metrics, values) == ({"train/loss": 1.0}, [f"values {rank}" for rank in range(8)])
    # Ranks count tensor, data, pipeline.
    shards = ["shard 0", "shard 0", "shard 1", "shard 1"] * 2
    assert calls == [("MegatronCriticRayActor", rank, "train", (3, shards[rank])) for rank in range(8)]
    calls.clear()

    actor = TrainGroup(run, options)
    assert await actor.train(3, ["shard 0", "shard 1"], values) == {"train/loss": 1.0}
    assert calls == [("MegatronTrainRayActor", rank, "train", (3, shards[rank], f"values {rank}")) for rank in range(8)]
    calls.clear()
    await actor.train(4, ["shard 0", "shard 1"])
    assert [arguments for *_, arguments in calls] == [(4, shard) for shard in shards]


def saved(root, *rollouts):
    for rollout_id in rollouts:
        checkpoint_folder(root, rollout_id).mkdir(parents=True)
        write_marker(root, rollout_id)


def test_what_a_critic_has_of_its_own():
    run = config(lr=0.1, lr_warmup_fraction=0.5, critic_lr_warmup_iters=3, save="a", critic_save="b", save_hf="c")
    critic = critic_config(run)
    changed = {name for name, value in dict(critic).items() if value != getattr(run, name)}
    assert changed == {"lr", "lr_warmup_iters", "lr_warmup_fraction", "save", "save_hf"}
    assert (critic.lr, critic.lr_warmup_iters, critic.lr_warmup_fraction) == (0.5, 3, None)
    assert (critic.load, critic.ckpt_step, critic.save, critic.save_hf) == (None, None, "b", None)


def test_a_critic_continues_where_its_actor_does(tmp_path, caplog):
    actor, critic = tmp_path / "actor", tmp_path / "critic"
    saved(actor, 1, 3)
    flags = {"load": str(actor), "critic_load": str(critic)}

    # Without any checkpoint it is a new one, and says so.
    with caplog.at_level(logging.WARNING):
        assert critic_config(config(**flags)).ckpt_step is None
    assert f"no checkpoint in {critic}: beside the actor of {actor}/iter_0000003 the critic is a new one" in caplog.text

    # One more was saved than of the actor: a crash came in between.
    saved(critic, 1, 3, 5)
    found = critic_config(config(**flags))
    assert (found.load, found.ckpt_step) == (str(critic), 3)
    assert critic_config(config(**flags, ckpt_step=1)).ckpt_step == 1

    # An actor that starts anew takes any critic.
    assert critic_config(config(critic_load=str(critic))).ckpt_step is None

    saved(actor, 7)
    with pytest.raises(
        ValueError, match="no checkpoint iter_0000007 in .*critic; there are: iter_0000001, iter_0000003"
    ):
        critic_config(config(**flags))
