"""Evaluation: each set with its own sampling, reward and generate function, all at the same time, beside training."""

import asyncio
import json

import pytest
from transformers import AutoTokenizer

from miles.engines.client import SGLangClient
from miles.rollout import evaluate
from miles.rollout.engine_pool import EnginePool, EnginesLost
from miles.rollout.evaluate import Evaluator, evaluation_metrics
from miles.rollout.generate import EachAlone, Sampling
from miles.rollout.group_runner import GroupRunner
from miles.rollout.hooks import Hooks
from miles.rollout.prompts.data_source import RolloutDataSource
from miles.rollout.user_functions import generate as user_generate
from miles.utils.arguments import parse_args
from miles.utils.errors import UserError
from miles.utils.types import Sample
from miles.utils.user_code import guarded
from tests.fast.rollout.fake_pool import FakePool

COMPLETED = Sample.Status.COMPLETED


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture
def evaluator_of(engine_flags, tokenizer, tmp_path):
    """An Evaluator of sets, a dict of settings each, whose prompts are given as texts; the label is the prompt."""

    def build(sets, *flags):
        for entry in sets:
            file = tmp_path / f"{entry['name']}.jsonl"
            rows = [{"input": prompt, "label": prompt} for prompt in entry.pop("prompts", ["ab", "cd"])]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            entry["path"] = str(file)
        (tmp_path / "eval.yaml").write_text(json.dumps({"datasets": sets}))
        named = ["--eval-interval", "1", "--eval-config", str(tmp_path / "eval.yaml")]
        config = parse_args([*engine_flags, *named, *flags])
        return config, Evaluator(config, tokenizer, Hooks())

    return build


def test_labels_that_the_reward_of_a_set_cannot_use_are_refused(evaluator_of):
    evaluator_of([{"name": "a", "rm_type": "gpqa", "prompts": ["A", "B"]}])
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the label 'ab' is not the letter of a choice"):
        evaluator_of([{"name": "a", "rm_type": "gpqa", "prompts": ["A", "ab"]}])


class RecordingPool(FakePool):
    """Keeps the sampling parameters of each sample by prompt and index."""

    def __init__(self, plan=lambda sample: sample.prompt):
        super().__init__(plan)
        self.parameters = {}

    async def complete(self, samples, parameters):
        for sample, given in zip(samples, parameters, strict=True):
            self.parameters[sample.prompt, sample.index] = given
        await super().complete(samples, parameters)


async def run(config, evaluator, pool=None):
    pool = pool or RecordingPool()
    return await evaluator.run(3, lambda hooks: GroupRunner(config, pool, hooks, evaluation=True))


async def test_each_set_is_sampled_as_it_says(evaluator_of):
    own = {"n_samples_per_eval_prompt": 2, "temperature": 0, "top_p": 0.5, "top_k": 3, "max_response_len": 4}
    own |= {"stop": ["x"], "stop_token_ids": [7], "min_new_tokens": 2}
    sets = [{"name": "own", "prompts": ["ab", "cd"], **own}, {"name": "plain", "prompts": ["ef"]}]
    flags = ["--eval-temperature", "0.3", "--n-samples-per-eval-prompt", "3", "--rollout-stop", "y"]
    config, evaluator = evaluator_of(sets, *flags, "--eval-min-new-tokens", "1", "--eval-max-context-len", "9")
    pool = RecordingPool()
    output = await run(config, evaluator, pool)
    assert [(s.prompt, s.group_index, s.index) for s in output.data["own"]] == [
        *(("ab", 0, 0), ("ab", 0, 1), ("cd", 1, 2), ("cd", 1, 3))
    ]
    assert [(s.prompt, s.group_index, s.index) for s in output.data["plain"]] == [("ef", 0, i) for i in range(3)]
    seeds = [given.pop("sampling_seed") for given in pool.parameters.values()]
    assert len(set(seeds)) == 7, "sets number their samples alike, and draw differently"
    expected = {"temperature": 0, "top_p": 0.5, "top_k": 3, "max_new_tokens": 4, "min_new_tokens": 2}
    assert pool.parameters["cd", 3] == expected | {"stop": ["x"], "stop_token_ids": [7]}
    expected = {"temperature": 0.3, "top_p": 1, "top_k": -1, "max_new_tokens": 7, "min_new_tokens": 1}
    assert pool.parameters["ef", 2] == expected | {"stop": ["y"], "stop_token_ids": None}


async def test_each_set_is_rewarded_as_it_says(evaluator_of):
    sets = [
        {"name": "exact", "metadata_overrides": {"level": {"of": 1}}},
        {"name": "f1", "rm_type": "f1", "metadata_overrides": {"rm": 1}},
    ]
    config, evaluator = evaluator_of(sets)
    output = await run(config, evaluator, RecordingPool(lambda sample: f"{sample.prompt} zz"))
    assert output.metrics["eval/exact"] == 0 and output.metrics["eval/f1"] == pytest.approx(2 / 3)
    first, second = output.data["exact"]
    assert first.metadata == {"level": {"of": 1}} and output.data["f1"][0].metadata == {"rm": 1, "rm_type": "f1"}
    first.metadata["level"]["of"] = 2
    assert second.metadata == {"level": {"of": 1}}
    assert (await run(config, evaluator)).data["exact"][0].metadata == {"level": {"of": 1}}


async def test_a_run_without_reward_has_those_of_its_sets(evaluator_of):
    config, evaluator = evaluator_of([{"name": "a", "rm_type": "exact"}])
    distilled = config.model_copy(update={"rm_type": None, "use_opd": True})
    assert (await run(distilled, evaluator)).metrics["eval/a"] == 1


def test_what_a_set_needs_is_checked_before_anything_starts(evaluator_of, monkeypatch, tmp_path):
    (tmp_path / "no.py").write_text("import no_such_package\n\ndef such(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="^evaluation set a: custom_generate_function_path no.such: can't be imported"):
        evaluator_of([{"name": "a", "custom_generate_function_path": "no.such"}])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        evaluator_of([{"name": "a", "rm_type": "math"}])


async def shouts(config, sample, sampling_params):
    """A generate function."""
    sample.response, sample.response_length, sample.tokens = "AB", 2, [*sample.tokens, 1, 2]
    sample.loss_mask, sample.rollout_log_probs, sample.status = [1, 1], [-0.5, -0.5], COMPLETED
    return sample


async def test_a_generate_function_of_its_own(evaluator_of):
    own = {"custom_generate_function_path": f"{__name__}.shouts"}
    config, evaluator = evaluator_of([{"name": "own", **own}, {"name": "other"}])
    data = (await run(config, evaluator)).data
    assert [sample.response for sample in data["own"]] == ["AB", "AB"]
    assert [sample.response for sample in data["other"]] == ["ab", "cd"]


async def test_the_runs_generate_function_unless_a_set_has_none(evaluator_of):
    sets = [{"name": "all"}, {"name": "none", "custom_generate_function_path": None}]
    config, evaluator = evaluator_of(sets, "--custom-generate-function-path", f"{__name__}.shouts")
    data = (await run(config, evaluator)).data
    assert data["all"][0].response == "AB" and data["none"][0].response == "ab"


@pytest.fixture
def generating(monkeypatch):
    """Let `shouts` be another function, by the path of the same name."""

    def replace(function):
        load = lambda config, tokenizer, path, flag: EachAlone(user_generate(guarded(f"{flag} {path}", function)))  # noqa: E731
        monkeypatch.setattr(evaluate, "load_generate", load)
        return {"custom_generate_function_path": f"{__name__}.shouts"}

    return replace


async def test_all_sets_are_sampled_at_the_same_time(evaluator_of, generating):
    everybody = asyncio.Barrier(4)

    async def together(*arguments):
        await everybody.wait()
        return await shouts(*arguments)

    own = generating(together)
    config, evaluator = evaluator_of([{"name": "a", **own}, {"name": "b", **own}])
    assert len((await asyncio.wait_for(run(config, evaluator), 5)).data["b"]) == 2


async def test_the_first_error_ends_all_of_it(evaluator_of, generating):
    ended = []

    async def lost_or_endless(config, sample, sampling_params):
        if sample.prompt == "ab":
            raise EnginesLost("no engine is left")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(sample.prompt)

    own = generating(lost_or_endless)
    config, evaluator = evaluator_of([{"name": "a", "prompts": ["cd"], **own}, {"name": "b", "prompts": ["ab"], **own}])
    before = len(asyncio.all_tasks())
    with pytest.raises(EnginesLost, match="no engine is left"):
        await asyncio.wait_for(run(config, evaluator), 5)
    assert ended == ["cd"] and len(asyncio.all_tasks()) == before


async def test_a_missing_sample_is_an_error(evaluator_of, monkeypatch):
    real = evaluate.run_groups

    async def loses_one(*arguments):
        return (await real(*arguments))[1:]

    monkeypatch.setattr(evaluate, "run_groups", loses_one)
    config, evaluator = evaluator_of([{"name": "a"}])
    with pytest.raises(RuntimeError, match="evaluation a: asked for samples 0 to 1, 1 came back"):
        await run(config, evaluator)


async def test_failed_samples_are_counted_up_to_a_bound(evaluator_of, generating):
    async def fails(config, sample, sampling_params):
        if sample.prompt == "ab":
            raise OSError("no tool")
        return await shouts(config, sample, sampling_params)

    own = generating(fails)
    flags = ["--max-failed-sample-fraction", "0.5", "--rollout-sample-retries", "0"]
    config, evaluator = evaluator_of([{"name": "a", **own}], *flags)
    metrics = (await run(config, evaluator)).metrics
    assert metrics["eval/a-failed_ratio"] == metrics["eval/a-none_reward_ratio"] == 0.5 and metrics["eval/a"] == 0
    config, evaluator = evaluator_of([{"name": "a", "prompts": ["ab", "ab", "cd"], **own}], *flags)
    with pytest.raises(UserError, match="2 of 3 samples failed.*OSError: no tool"):
        await run(config, evaluator)


async def abstains(config, sample):
    """A reward: half of the prompt is no answer, none of it is no question."""
    return None if sample.prompt == "ab" else float(sample.response == sample.label)


async def test_rewards_that_abstain_are_no_zeros(evaluator_of, caplog):
    config, evaluator = evaluator_of([{"name": "a", "prompts": ["ab", "cd", "ef"]}])
    config = config.model_copy(update={"rm_type": None, "custom_rm_path": f"{__name__}.abstains"})
    metrics = (await run(config, evaluator, RecordingPool(lambda sample: "cd"))).metrics
    assert metrics["eval/a"] == 0.5 and metrics["eval/a-none_reward_ratio"] == pytest.approx(1 / 3)
    assert "evaluation a: 1 of 3 samples have no reward" in caplog.text


@pytest.mark.parametrize("flags", [[], ["--log-passrate"]])
async def test_pass_rates_are_of_whole_groups(evaluator_of, flags):
    sets = [{"name": "a", "n_samples_per_eval_prompt": 4, "prompts": ["ab"]}, {"name": "b", "prompts": ["ab"]}]
    config, evaluator = evaluator_of(sets, *flags)
    pool = RecordingPool(lambda sample: "ab" if sample.index == 2 else "cd")
    metrics = (await run(config, evaluator, pool)).metrics
    expected = {"eval/a-pass@1": 0.25, "eval/a-pass@2": 0.5, "eval/a-pass@4": 1, "eval/b-pass@1": 0}
    assert {name: value for name, value in metrics.items() if "pass@" in name} == (expected if flags else {})


async def test_training_is_not_touched(evaluator_of, tokenizer):
    """Neither the position in the prompts, nor the numbers and seeds of the samples that are trained on."""
    config, evaluator = evaluator_of([{"name": "a", "n_samples_per_eval_prompt": 2}])
    data, alone = RolloutDataSource(config, tokenizer), RolloutDataSource(config, tokenizer)
    data.get_samples(3), alone.get_samples(3)
    pools = [RecordingPool(), RecordingPool()]
    await run(config, evaluator, pools[0])
    state = data.state_dict()
    assert state == alone.state_dict() and data.get_samples(2) == alone.get_samples(2)
    await run(config, evaluator, pools[1])
    assert pools[0].parameters == pools[1].parameters, "the same draws, whenever it takes place"
    trained = Sampling.for_rollout(config).parameters(Sample(index=0, tokens=[1]))["sampling_seed"]
    assert trained not in [given["sampling_seed"] for given in pools[0].parameters.values()]


def test_sets_are_read_like_prompts_to_train_on(engine_flags, tokenizer, prompt_file, caplog):
    sets = ["--eval-prompt-data", "long", f"{prompt_file}@[-6:]", "short", f"{prompt_file}@[:2]"]
    config = parse_args([*engine_flags, "--eval-interval", "1", *sets, "--eval-max-prompt-len", "6"])
    long, short = evaluate.load_eval_sets(config, tokenizer)
    assert [group[0].prompt for group in long.groups()] == ["abcdefgh"[:i] for i in (3, 4, 5, 6)]
    assert short.groups()[1][0].tokens == [97, 98] and short.groups()[1][0].label == "1"
    assert "prompts.jsonl@[-6:]: left out 2 of 6 prompts of more than 6 tokens" in caplog.text
    limits = ["--eval-max-context-len", "5", "--rollout-max-context-len", "64"]
    flags = [flag for flag in engine_flags if flag not in ("--rollout-max-context-len", "64")]
    config = parse_args([*flags, *limits, "--eval-interval", "1", *sets])
    long, _ = evaluate.load_eval_sets(config, tokenizer)
    assert [len(group[0].tokens) for group in long.groups()] == [3, 4], "room for a token"


def test_columns_of_its_own(engine_flags, tokenizer, tmp_path):
    row = {"q": "ab", "a": "x", "m": {"k": 1}, "metadata": {"k": 2}, "label": "y", "input": "cd"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    entry = {"path": str(tmp_path / "rows.jsonl")}
    own = entry | {"name": "own", "input_key": "q", "label_key": "a", "metadata_key": "m"}
    (tmp_path / "eval.yaml").write_text(json.dumps({"datasets": [own, entry | {"name": "flags"}]}))
    config = parse_args([*engine_flags, "--eval-interval", "1", "--eval-config", str(tmp_path / "eval.yaml")])
    own, flags = [one.groups()[0][0] for one in evaluate.load_eval_sets(config, tokenizer)]
    assert (own.prompt, own.label, own.metadata) == ("ab", "x", {"k": 1})
    assert (flags.prompt, flags.label, flags.metadata) == ("cd", "y", {"k": 2})


def test_a_file_that_became_wrong_is_refused(evaluator_of, tokenizer, tmp_path):
    config, _ = evaluator_of([{"name": "a"}])
    (tmp_path / "eval.yaml").write_text("datasets: [{name: a}]")
    with pytest.raises(ValueError, match="set a has no path"):
        Evaluator(config, tokenizer, Hooks())


def test_metrics_of_a_users_evaluation(engine_config):
    done = {"status": COMPLETED, "tokens": [1, 2], "response_length": 1, "loss_mask": [1]}
    data = {"mine": [Sample(reward=1.0, **done), Sample(reward=0.0, **done), Sample(reward=0.0, **done)]}
    assert evaluation_metrics(engine_config, data)["eval/mine"] == pytest.approx(1 / 3)


async def test_on_a_real_engine(evaluator_of, engine_server, tokenizer):
    """Greedy answers of a set are equal, drawn ones of another are not; each ends at its own limit, or before it."""
    sets = [
        {"name": "greedy", "temperature": 0, "n_samples_per_eval_prompt": 2, "max_response_len": 3},
        {"name": "drawn", "n_samples_per_eval_prompt": 4, "max_response_len": 6, "min_new_tokens": 2},
    ]
    config, evaluator = evaluator_of(sets, "--log-passrate")
    client = SGLangClient(engine_server, request_timeout=60, retries=1)

    async def all_live():
        return {}

    pool = EnginePool(config, [client], 64, tokenizer, all_live)
    output = await run(config, evaluator, pool)
    await client.close()
    greedy, drawn = output.data["greedy"], output.data["drawn"]
    assert greedy[0].tokens == greedy[1].tokens and greedy[2].tokens == greedy[3].tokens
    assert len({tuple(sample.tokens) for sample in drawn[:4]}) > 1
    assert all(sample.response_length <= 3 for sample in greedy)
    assert all(2 <= sample.response_length <= 6 for sample in drawn)
    for name, limit in (("greedy", 3), ("drawn", 6)):
        cut = [sample.status is Sample.Status.TRUNCATED for sample in output.data[name]]
        assert output.metrics[f"eval/{name}-truncated_ratio"] == sum(cut) / len(cut)
        assert all(sample.response_length == limit for sample, was in zip(output.data[name], cut, strict=True) if was)
    assert output.metrics["eval/drawn-pass@4"] >= output.metrics["eval/drawn-pass@1"] == output.metrics["eval/drawn"]
