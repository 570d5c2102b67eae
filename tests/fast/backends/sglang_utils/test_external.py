import importlib.metadata
import json
import shutil

import pytest

from miles.backends.sglang_utils.external import ExternalEngine, _server_problems, _stale_copies
from miles.engines.client import SGLangClient, SGLangError
from miles.utils.network import free_port

FINE = {"version": importlib.metadata.version("sglang"), "dtype": "float32", "enable_dp_attention": False}
FINE |= {"tp_size": 1, "pp_size": 1, "dp_size": 1, "quantization": None, "speculative_algorithm": None}
FINE |= {"max_req_input_len": 65, "json_model_override_args": "{}"}


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    """A copy of the checkpoint, with `changes` made to its config.json: `checkpoint(**changes)`."""

    def copy(**changes):
        shutil.copytree(tiny_checkpoint, tmp_path / "copy")
        file = tmp_path / "copy" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return str(tmp_path / "copy")

    return copy


def engine_of(config, url, **changes):
    return ExternalEngine(config.model_copy(update=changes), url.removeprefix("http://"))


async def test_a_server_that_fits_is_taken_and_left_running(engine_config, engine_server, checkpoint):
    # What says nothing about the model may differ.
    engine = engine_of(engine_config, engine_server, hf_checkpoint=checkpoint(transformers_version="0"))
    assert await engine.start() == engine_server
    await engine.check()
    await engine.shutdown()
    await engine.shutdown()
    async with SGLangClient(engine_server) as client:
        await client.health()


async def test_all_that_differs_is_named(engine_config, engine_server, checkpoint):
    other = checkpoint(rms_norm_eps=0.5)
    engine = engine_of(engine_config, engine_server, bf16=True, rollout_num_gpus_per_engine=2, hf_checkpoint=other)
    with pytest.raises(ValueError) as caught:
        await engine.start()
    await engine.shutdown()
    assert str(caught.value) == (
        f"the external engine {engine_server} (--rollout-external-engine-addrs) has tp_size 1, not "
        "--rollout-num-gpus-per-engine 2: change either; it has dtype float32, the trainer has bfloat16: start it with "
        f"--dtype bfloat16; it serves {engine_config.hf_checkpoint}, whose config.json differs from --hf-checkpoint "
        f"{other}: rms_norm_eps 1e-06 instead of 0.5"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": "0.1"}, "runs SGLang 0.1, here is "),
        ({"pp_size": 2}, "has pp_size 2, which weights cannot be sent to"),
        ({"dp_size": 2}, "has dp_size 2 without DP attention"),
        ({"dp_size": 2, "enable_dp_attention": True}, None),
        ({"speculative_algorithm": "EAGLE"}, "has speculative_algorithm EAGLE, whose draft gets no new weights"),
        ({"speculative_algorithm": "NGRAM"}, None),
        ({"quantization": "fp8"}, "has quantization fp8, which weights cannot be sent to"),
        ({"max_req_input_len": 64}, "goes on with at most 63 tokens, and prompt and response may have 64: start it"),
    ],
)
def test_what_cannot_be_used(engine_config, changes, expected):
    problems = _server_problems(engine_config, FINE | changes)
    assert len(problems) == (expected is not None) and all(expected in problem for problem in problems)


@pytest.mark.parametrize("override", ["{}", '{"quantization_config": null}'])
def test_quantised_weights_are_no_place_for_the_trainers(engine_config, checkpoint, override):
    quantised = checkpoint(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    config = engine_config.model_copy(update={"hf_checkpoint": quantised})
    problems = _server_problems(config, FINE | {"json_model_override_args": override})
    assert ["has the quantised weights of its checkpoint" in problem for problem in problems] == [True] * (
        override == "{}"
    )
    alone = config.model_copy(update={"debug_rollout_only": True})
    assert not _server_problems(alone, FINE | {"json_model_override_args": override})


@pytest.mark.parametrize(("kind", "refused"), [("glm4_moe", True), ("glm4_moe_lite", True), ("glm4", False)])
def test_models_of_which_an_update_would_not_reach_all(kind, refused):
    problems = _stale_copies({"model_type": kind})
    assert ["that it never renews after an update" in problem for problem in problems] == [True] * refused


async def test_nobody_there(engine_config):
    engine = engine_of(engine_config, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match="the external engine .*--rollout-external-engine-addrs.*no answer"):
        await engine.start()
    with pytest.raises(SGLangError, match="no answer"):
        await engine.check()
    await engine.shutdown()
