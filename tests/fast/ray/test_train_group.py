"""What each rank is called with, what becomes of a failure, and which checkpoint a critic continues from."""

import asyncio
import errno
import re
import time

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from safetensors import SafetensorError

from miles.config import RunConfig
from miles.ray.train import group as group_module
from miles.ray.train.group import CriticGroup, TrainGroup, critic_config
from miles.utils.errors import AnotherRankFailed, UserError
from tests.fast.fake_checkpoint import save_fake

NODES = [f"10.0.0.{node}" for node in range(8)]


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
    metrics, values = await CriticGroup(run, options, NODES).train(3, ["shard 0", "shard 1"])
    assert (metrics, values) == ({"train/loss": 1.0}, [f"values {rank}" for rank in range(8)])
    # Ranks count tensor, data, pipeline.
    shards = ["shard 0", "shard 0", "shard 1", "shard 1"] * 2
    assert calls == [("MegatronCriticRayActor", rank, "train", (3, shards[rank])) for rank in range(8)]
    calls.clear()

    actor = TrainGroup(run, options, NODES)
    assert await actor.train(3, ["shard 0", "shard 1"], values) == {"train/loss": 1.0}
    assert calls == [("MegatronTrainRayActor", rank, "train", (3, shards[rank], f"values {rank}")) for rank in range(8)]
    calls.clear()
    await actor.train(4, ["shard 0", "shard 1"])
    assert [arguments for *_, arguments in calls] == [(4, shard) for shard in shards]


class OutOfMemoryError(RuntimeError):
    """torch's has this name."""


GLOO = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation"
KINDS = {
    "GPU": (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "lower --max-tokens-per-gpu"),
    "host": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "fewer ranks"),
    "disk": (OSError(errno.ENOSPC, "No space left on device", "/data/iter_3"), "/data/iter_3.*the disk is full"),
    "file": (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "is full"),
    "bad file": (SafetensorError("Error while deserializing header: header too large"), "header too large"),
    "assertion": (AssertionError("3 shards"), "AssertionError: 3 shards"),
    "sentence": (UserError("writing to --save /data failed: No space left on device"), "on device$"),
    "signal": (ActorDiedError(), "ActorDiedError: The actor died unexpectedly.*ended by a signal.*dmesg"),
}
VERBS = {
    "train": (3, ["shard"] * 3),
    "save": (3,),
    "export_hf": (3,),
    "update_weights": (4,),
    "sleep": (),
    "wake_up": (),
}


class Ranks:
    """Stands in for the clients of ranks: each does what `behaviour` says of it, an error or seconds of waiting."""

    def __init__(self, monkeypatch, behaviour):
        self.killed, everyone = [], self

        class Client:
            def __init__(self, path, config, rank, world_size, options):
                self.rank = rank

            def kill(self):
                everyone.killed.append(self.rank)

            def __getattr__(self, method):
                async def call(*arguments):
                    seconds, error = behaviour[self.rank]
                    await asyncio.sleep(seconds)
                    if error is not None:
                        raise error
                    return {}

                return call

        monkeypatch.setattr(group_module, "ActorClient", Client)
        self.group = TrainGroup(config(actor_num_gpus_per_node=len(behaviour)), [{}] * len(behaviour), NODES)

    async def failure(self, verb):
        """What `verb` raises, and the seconds it took."""
        begin = time.monotonic()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await getattr(self.group, verb)(*VERBS[verb])
        return caught.value, time.monotonic() - begin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
async def test_the_first_failure_is_named_at_once_and_no_rank_waits_for_it_longer_than_the_grace(
    monkeypatch, caplog, verb, kind
):
    error, expected = KINDS[kind]
    monkeypatch.setattr(group_module, "GRACE_SECONDS", 0.05)
    ranks = Ranks(monkeypatch, [(600, None), (0, None), (0.01, error)])
    error.__notes__ = []
    raised, seconds = await ranks.failure(verb)
    assert raised is error and seconds < 10
    assert ranks.killed == [0]
    first, ended = raised.__notes__
    said = caplog.messages[0]  # before the others were waited for
    assert re.match(f"trainer rank 2 on 10.0.0.2 failed in {verb}: .*{expected}", said)
    assert first.startswith(f"trainer rank 2 on 10.0.0.2 failed in {verb}")
    assert said.endswith(first.partition("; ")[2])  # what to do
    assert ended == "trainer rank 0 on 10.0.0.0 did not answer within 0.05 s of it and had to be ended"


def as_ray_does(error):
    """What the driver gets of an actor's error."""
    return RayTaskError("call", "Traceback of the rank", error, "proctitle", 1, "10.0.0.1").as_instanceof_cause()


async def test_who_only_waited_does_not_lead(monkeypatch):
    """Though its failure came first; and equal ones are told once."""
    lost = RuntimeError("[../gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4000")
    cause = KeyError("name")
    cause.add_note("while writing /data")
    behaviour = [
        (0, lost),
        (0.01, AnotherRankFailed("heard")),
        (0.02, cause),
        (0.03, ValueError("mine")),
        (0, lost),
        (0.04, cause),
    ]
    ranks = Ranks(monkeypatch, [(seconds, as_ray_does(error)) for seconds, error in behaviour])
    raised, _ = await ranks.failure("sleep")
    assert isinstance(raised, KeyError) and ranks.killed == []
    assert raised.__notes__ == [
        "while writing /data",
        "trainer rank 2 on 10.0.0.2 failed in sleep",
        "trainer rank 3 on 10.0.0.3 failed after that: ValueError: mine",
        "trainer rank 5 on 10.0.0.5 failed after that: the same",
        "trainer rank 0 on 10.0.0.0, trainer rank 4 on 10.0.0.4 failed after that: RuntimeError: " + str(lost),
        "trainer rank 1 on 10.0.0.1 failed after that: AnotherRankFailed: heard",
    ]


async def test_a_rank_that_hangs_is_named_where_all_others_waited_for_it(monkeypatch):
    monkeypatch.setattr(group_module, "GRACE_SECONDS", 0.05)
    ranks = Ranks(monkeypatch, [(0, RuntimeError(GLOO)), (600, None)])
    raised, _ = await ranks.failure("sleep")
    assert "Timed out waiting" in str(raised) and ranks.killed == [1]
    assert raised.__notes__[1:] == [
        "trainer rank 1 on 10.0.0.1 did not answer within 0.05 s of it and had to be ended",
        "so that one of those is what the others waited for",
    ]


def test_variables_of_the_user_stand_over_those_of_miles(monkeypatch):
    started = []
    monkeypatch.setattr(group_module, "ActorClient", lambda *arguments, options: started.append(options))
    run = config(actor_num_gpus_per_node=1, train_env_vars={"TORCH_COMPILE_DISABLE": "0", "NCCL_DEBUG": "INFO"})
    TrainGroup(run, [{"num_cpus": 1}], NODES[:1])
    variables = {"TORCH_COMPILE_DISABLE": "0", "NCCL_DEBUG": "INFO"}
    assert started == [{"num_cpus": 1, "runtime_env": {"env_vars": variables}}]


def test_what_a_critic_has_of_its_own():
    run = config(lr=0.1, lr_warmup_fraction=0.5, critic_lr_warmup_iters=3, save="a", critic_save="b", save_hf="c")
    critic = critic_config(run)
    changed = {name for name, value in dict(critic).items() if value != getattr(run, name)}
    assert changed == {"lr", "lr_warmup_iters", "lr_warmup_fraction", "save", "save_hf"}
    assert (critic.lr, critic.lr_warmup_iters, critic.lr_warmup_fraction) == (0.5, 3, None)
    assert (critic.load, critic.ckpt_step, critic.save, critic.save_hf) == (None, None, run.critic_save, None)


def test_a_critic_continues_where_its_actor_does(tmp_path):
    folder = str(tmp_path)
    save_fake(tmp_path, 1, 3, rollout=False)
    for given, load, step in (
        ({"load": "a", "ckpt_step": 1, "critic_load": folder}, folder, 1),
        ({"load": "a", "ckpt_step": 1}, None, None),  # a new one beside it
        ({"critic_load": folder}, folder, 3),  # an actor that starts anew takes any critic
        ({"critic_load": f"{folder}/none"}, None, None),
    ):
        critic = critic_config(config(**given))
        assert (critic.load, critic.ckpt_step) == (load, step)
