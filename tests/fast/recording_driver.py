"""`train.run` with services that only record: what the tests of its order are made of."""

import asyncio
import importlib.util
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

from miles.ray import placement_group
from miles.ray.resume import resumed
from miles.ray.rollout.training_data import RolloutResult
from miles.residency import filesystem
from miles.residency.plan import Region
from miles.tracking.sinks import Sinks
from miles.utils.arguments import parse_args
from miles.utils.checkpoint_folder import begin_checkpoint
from tests.fast.fake_checkpoint import write_ranks, write_rollout

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
train = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(train)


class Service:
    """A client whose every call is written down as "<name> <verb> <arguments>"; `save` of them saves something.

    Moves are written down as "<name> leaves <regions>" or "<name> returns <regions>".
    """

    def __init__(self, name, calls, answers, fail_at, save, places):
        self._name, self._calls, self._answers, self._fail_at, self._save = name, calls, answers, fail_at, save
        self._places = places

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)

        def call(*arguments):
            """Written down when it is made, as Ray sends a call that nobody awaits yet."""
            if verb == "check_engines":  # after a failure, which is none of an engine here
                return asyncio.sleep(0)
            line = f"{self._name} {_words(verb, arguments)}"
            fails = len(self._calls) == self._fail_at
            if not fails:
                self._calls.append(line)
                self._places.see(self._name, verb, arguments)
                if verb == "save":
                    self._save(arguments[0])

            given = self._answers.get(verb, {})
            given = given() if callable(given) else given

            async def answer():
                if fails:
                    raise OSError(line)
                await asyncio.sleep(0)  # as every call of Ray lets others go on
                return given

            return answer()

        return call


class Places:
    """What is away, and whether the engines' weights are written: nobody uses what is not there."""

    def __init__(self):
        self.away, self.written = set(), True

    def see(self, name, verb, arguments):
        """A call that is made. The services are a run's own: what is away is known of them alone."""
        match name, verb:
            case _, "move":
                keys = {(name, move.region) for move in arguments[0]}
                leave = arguments[0][0].leaves
                assert keys.isdisjoint(self.away) if leave else keys <= self.away, f"{name} {keys} move twice"
                self.away = self.away | keys if leave else self.away - keys
                self.written = self.written and ("rollout", Region.WEIGHTS) not in keys
            case _, "update_weights":
                assert ("rollout", Region.WEIGHTS) not in self.away
                self.written = True
            case "rollout", "generate" | "evaluate":
                assert self.written and not self._lacks("rollout"), f"{verb} without {self._lacks('rollout')}"
            case _, "train":
                assert not self._lacks(name), f"{name} trains without {self._lacks(name)}"
            case "trainer" | "critic", "save" | "export_hf":
                assert self._lacks(name) <= {Region.GRADS}, f"{name} saves without {self._lacks(name)}"

    def _lacks(self, name):
        return {region for owner, region in self.away if owner == name}


def _words(verb, arguments):
    match verb:
        case "move":
            (moves,) = arguments
            return " ".join(("leaves" if moves[0].leaves else "returns", *(move.region for move in moves)))
        case "connect":
            return verb
        case "train" | "save":
            return f"{verb} {arguments[0]}"
    return " ".join((verb, *map(str, arguments)))


def driver(tmp_path, monkeypatch):
    """Runs `train.run` with recording services on the configuration of `flags`; returns the calls."""
    (tmp_path / "model").mkdir()
    shape = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
    shape["num_hidden_layers"] = 4
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    (tmp_path / "prompts.jsonl").touch()
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    monkeypatch.setattr(filesystem, "MOUNTS", mounts)
    monkeypatch.chdir(tmp_path)
    base = [
        *("--device", "cpu", "--actor-num-gpus-per-node", "4", "--hf-checkpoint", "model", "--label-key", "answer"),
        *("--prompt-data", "prompts.jsonl", "--rm-type", "exact", "--rollout-batch-size", "8"),
        *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "16", "--no-use-tensorboard"),
    ]
    folders = itertools.count()

    async def run(flags="--colocate", calls=None, fail_at=None, rollouts=3, **more_answers):
        length = () if "--num-epoch" in flags else ("--num-rollout", str(rollouts))
        config = parse_args([*base, *length, *flags.split(), "--run-dir", str(tmp_path / f"run {next(folders)}")])
        calls = [] if calls is None else calls
        answers = {
            "generate": RolloutResult([], {}),
            "engine_urls": ["http://engine"],
            "resolved_config": resumed(config).model_copy(update={"num_rollout": rollouts}),
            "load": 7,
            **more_answers,
        }
        bundles = [SimpleNamespace(node_ip="here")] * config.world_size if config.needs_trainer else []
        placement = SimpleNamespace(trainer=bundles, options=lambda bundle, share: {})
        places = Places()
        rollout = Service("rollout", calls, answers, fail_at, write_rollout, places)

        async def create_rollout_manager(config, placement):
            calls.append("rollout created")
            return rollout

        def group(name, root, **more):
            def save(rollout_id):
                write_ranks(begin_checkpoint(root, rollout_id))

            return lambda config, options, nodes: Service(name, calls, answers | more, fail_at, save, places)

        monkeypatch.setattr(placement_group, "create_placement_groups", lambda config: placement)
        monkeypatch.setattr(placement_group, "create_rollout_manager", create_rollout_manager)
        monkeypatch.setattr(placement_group, "TrainGroup", group("trainer", config.save))
        monkeypatch.setattr(placement_group, "CriticGroup", group("critic", config.critic_save, train=({}, [None])))
        await train.run(config, Sinks())
        return calls

    return run


def calls_of(text):
    """The calls in it, separated by commas and line ends."""
    return [call.strip() for call in text.replace("\n", ",").split(",") if call.strip()]


def steps_of(set_up, *steps):
    """All calls of a run. `{id}` of a step is the rollout's number, `{version}` that of the weights it sends."""
    versions, calls = itertools.count(2), []
    for rollout_id, step in enumerate(steps):
        for line in calls_of(step):
            calls.append(line.format(id=rollout_id, version=next(versions) if "{version}" in line else None))
    return ["rollout created", "rollout resolved_config", *calls_of(set_up), *calls, "rollout dispose"]
