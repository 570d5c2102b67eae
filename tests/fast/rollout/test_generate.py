import pytest
from transformers import AutoTokenizer

from miles.engines.client import SGLangClient
from miles.rollout.answers import UnusableAnswer, end_token_ids, read_answer
from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate import Sampling, generate
from miles.utils.arguments import parse_args
from miles.utils.types import Sample
from tests.fast.backends.sglang_utils.misbehaving import MisbehavingServer, answer_of, good, writes


async def all_live():
    return {}


def sampling_of(**changes):
    return Sampling(
        **{
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "max_response_len": 8,
            "max_context_len": 64,
            "stop": ["x"],
            "stop_token_ids": [5],
            "seed": "s",
            **changes,
        }
    )


def test_parameters_are_sglangs():
    given = sampling_of(min_new_tokens=3).parameters(Sample(index=0, tokens=[1]))
    assert 0 <= given.pop("sampling_seed") < 2**63
    assert given == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_new_tokens": 8,
        "min_new_tokens": 3,
        "stop": ["x"],
        "stop_token_ids": [5],
    }


def test_parameters_are_the_samples_own():
    """A generate function adds ends for a turn: later samples don't get them, nor does the configuration."""
    sampling = sampling_of()
    given = sampling.parameters(Sample(index=0, tokens=[1]))
    given["stop"].append("y")
    given["stop_token_ids"].append(6)
    assert (sampling.stop, sampling.stop_token_ids) == (["x"], [5])


def test_each_sample_and_each_purpose_has_a_seed_of_its_own():
    seeds = [
        sampling_of(seed=seed).parameters(Sample(index=index, tokens=[1]))["sampling_seed"]
        for seed in ("rollout 1", "eval set 1")
        for index in range(100)
    ]
    assert len(set(seeds)) == 200
    assert seeds[3] == sampling_of(seed="rollout 1").parameters(Sample(index=3, tokens=[9]))["sampling_seed"]


@pytest.mark.parametrize(
    ("sample", "room", "fewest"),
    [
        ({"tokens": [1] * 60}, 4, 3),
        ({"tokens": [1] * 20, "response_length": 2}, 6, 1),
        ({"tokens": [1] * 20, "response_length": 5, "loss_mask": [1, 1, 0, 0, 0]}, 6, 1),
        ({"tokens": [1] * 63, "response_length": 2}, 1, 1),
        ({"tokens": [1] * 64, "response_length": 2}, 0, 0),
        ({"tokens": [1] * 20, "response_length": 8}, 0, 0),
        ({"tokens": [1] * 20, "response_length": 9}, 0, 0),
    ],
)
def test_what_is_left_of_the_budget(sample, room, fewest):
    given = sampling_of(min_new_tokens=3).parameters(Sample(index=0, **sample))
    assert (given["max_new_tokens"], given["min_new_tokens"]) == (room, fewest)


def test_a_prompt_without_room():
    with pytest.raises(ValueError, match="sample 7: its prompt of 64 tokens leaves no room.* within 64 tokens"):
        sampling_of().parameters(Sample(index=7, tokens=[1] * 64))
    assert sampling_of(max_context_len=None).parameters(Sample(index=7, tokens=[1] * 64))["max_new_tokens"] == 8


async def test_greedy(engine_config, engine_server):
    sampling = sampling_of(temperature=0.0, top_p=1.0, top_k=-1, stop=None, stop_token_ids=None)
    samples = [Sample(index=i, tokens=[97, 98]) for i in range(2)]
    async with SGLangClient(engine_server) as client:
        a, b = await client.generate([s.tokens for s in samples], [sampling.parameters(s) for s in samples])
    assert a["output_ids"] == b["output_ids"]


async def test_the_default_function_extends_by_one_response_each_time(engine_config, tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    sample = Sample(index=0, tokens=[97])
    async with MisbehavingServer(good) as server, SGLangClient(server.url) as client:
        pool = EnginePool(engine_config, [client], 8, tokenizer, all_live)
        parameters = sampling_of().parameters(sample)
        with pool.active():
            assert await generate(engine_config, sample, parameters) is sample
            sample.append_context([98])
            await generate(engine_config, sample, {**parameters, "max_new_tokens": 2})
        assert [body["input_ids"] for body in server.seen] == [[[97]], [[97, 65, 66, 98]]]
        assert [body["sampling_params"][0]["max_new_tokens"] for body in server.seen] == [8, 2]
        assert sample.response == "ABbAB"
        with pytest.raises(RuntimeError, match="there are no engines here"):
            await generate(engine_config, sample, parameters)


async def test_the_longest_that_an_engine_takes(engine_flags, engine_server, tiny_checkpoint, tmp_path):
    """Responses that would go beyond the model's 512 tokens end there, also of the longest prompt, also if gone on
    with."""
    flags = [flag for flag in engine_flags if flag not in ("--rollout-max-context-len", "64")]
    flags[flags.index("--rollout-max-response-len") + 1] = "5000"
    config = parse_args([*flags, "--run-dir", str(tmp_path)])
    sampling = Sampling.for_rollout(config)
    samples = [Sample(index=n, tokens=[97] * n) for n in (config.rollout_max_prompt_len, 500, 1)]
    async with SGLangClient(engine_server) as client:
        pool = EnginePool(config, [client], 8, AutoTokenizer.from_pretrained(tiny_checkpoint), all_live)
        await pool.complete(samples, [sampling.parameters(sample) for sample in samples])
        assert {sample.status for sample in samples} <= {Sample.Status.COMPLETED, Sample.Status.TRUNCATED}
        assert max(len(sample.tokens) for sample in samples) <= 505
        samples[2].append_context([97] * (504 - len(samples[2].tokens)))
        await pool.complete(samples, [sampling.parameters(sample) for sample in samples])
    assert len(samples[2].tokens) == 505 and samples[2].response_length == 504


@pytest.mark.parametrize(
    ("last", "stop", "text"),
    [
        (66, {"stop_token_ids": [66]}, "AB"),  # named by the user, and text
        (257, {"stop_token_ids": [257]}, "A"),  # named by the user, and a special token
        (259, {}, "A"),  # the model's own
        (66, {"stop": ["A"]}, "A"),
        (66, {}, "AB"),
    ],
)
async def test_what_a_reward_sees_of_the_end(engine_config, tiny_checkpoint, last, stop, text):
    sample = Sample(index=0, tokens=[97])
    async with MisbehavingServer(writes(65, last)) as server, SGLangClient(server.url) as client:
        pool = EnginePool(engine_config, [client], 8, AutoTokenizer.from_pretrained(tiny_checkpoint), all_live)
        await pool.complete([sample], [{"max_new_tokens": 2, **stop}])
    assert sample.response == text and sample.tokens == [97, 65, last]


@pytest.mark.parametrize("stop", ["", ["a", ""]])
async def test_a_function_that_stops_at_every_token(engine_config, tiny_checkpoint, stop):
    pool = EnginePool(engine_config, [], 8, AutoTokenizer.from_pretrained(tiny_checkpoint), all_live)
    with pytest.raises(ValueError, match="stop holds an empty text, which ends every response at once"):
        await pool.complete([Sample(index=0, tokens=[97])], [{"max_new_tokens": 2, "stop": stop}])


def test_end_ids_are_those_of_model_and_tokenizer(tiny_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    assert end_token_ids(tmp_path, tokenizer) == {tokenizer.eos_token_id}
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert end_token_ids(tmp_path, tokenizer) == {3, 4, 5, tokenizer.eos_token_id}


def test_log_probs_of_other_tokens_are_refused():
    with pytest.raises(UnusableAnswer, match=r"other tokens than its own: \[65, 66\], not \[65, 67\]"):
        read_answer({**answer_of([65, 66]), "output_ids": [65, 67]})
