"""Every layout of every script passes the configuration's checks for the published model."""

import math
import re

import pytest

from miles.backends.megatron_utils.families import family_for
from miles.config.resolve import resolve
from miles.hf.config import load_hf_config
from tests.fast.scripts.launching import SCRIPTS, choices, make_folders, plan_of, recipe_of
from tests.fast.scripts.ledgers import PAGE, ledgers, models, row

RECIPES = {path.stem: recipe_of(path) for path in SCRIPTS}
MODELS = {model.name: model for name, recipe in RECIPES.items() if name != "run_tiny" for model in recipe.models}
# As their makers count them, without the layers for further tokens.
PARAMETERS = {
    "DeepSeek-R1": 671_026_419_200,
    "DeepSeek-V3.2": 671_877_944_064,
    "DeepSeek-V4-Flash": 284_334_567_511,
    "DeepSeek-V4-Flash-FP8-4layer": 27_390_526_813,
    "DeepSeek-V4-Pro": 1_572_999_528_803,
    "GLM-4.5": 352_797_829_024,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.7-Flash": 29_943_393_920,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "MiniMax-M2": 228_689_764_864,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen3.5-4B": 4_205_751_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM2-360M-Instruct": 361_821_120,
    "SmolLM2-1.7B-Instruct": 1_711_376_384,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-270m-it": 268_098_176,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    make_folders(folder, list(MODELS.values()))
    return folder


def test_every_model_is_in_one_script():
    assert sum(len(recipe.models) for recipe in RECIPES.values()) == len(MODELS) + 1


@pytest.mark.parametrize("script", [name for name in RECIPES if name != "run_tiny"])
def test_every_layout_is_accepted(script, folders):
    recipe = RECIPES[script]
    for model in recipe.models:
        for layout in model.layouts:
            for choice in choices(layout):
                for more in ({}, {"mode": "debug_minimal"}, {"task": "gsm8k"}, {"num_nodes": 2 * layout.nodes}):
                    plan = plan_of(recipe, folders, model_name=model.name, **choice | more)
                    assert plan.layout == layout
                    resolved = resolve(plan.train_command()[2:])
                    assert not resolved.warnings, f"{model.name} {choice} {more}"
                    assert resolved.config.world_size == plan.num_nodes * plan.gpus_per_node


def numbers(line: str) -> list[float]:
    """All numbers of a row."""
    return [float(number) for number in re.findall(r"\d+", line)]


@pytest.mark.parametrize("name", models())
def test_every_layout_fits_its_hardware(name, folders):
    """By the ledger of `train.py --check`: GPUs and hosts have room in every phase, an engine for a sample."""
    recipe, model = models()[name]
    page = PAGE.read_text().splitlines()
    for written, ledger in ledgers(recipe, model, folders):
        assert bool(ledger.shortages) == bool(model.waits_for), f"{written}: {ledger.shortages}"
        (shown,) = (line for line in page if line.startswith(f"| {name} | {written} |"))
        assert numbers(shown) == pytest.approx(numbers(row(name, written, ledger)), rel=0.05, abs=1), (
            "run `python -m tests.fast.scripts.ledgers`"
        )


@pytest.mark.parametrize("script", ["run_qwen3_4b", "run_deepseek_v4"])
def test_engines_can_have_nodes_of_their_own(script, folders):
    recipe = RECIPES[script]
    layout = recipe.models[0].layouts[0]
    plan = plan_of(recipe, folders, hardware="H200", num_nodes=layout.nodes + 2, rollout_num_nodes=2)
    config = resolve(plan.train_command()[2:]).config
    assert (config.colocate, config.actor_num_nodes, config.rollout_num_gpus) == (False, layout.nodes, 16)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shape_is_the_published_one(name, folders):
    """The family takes config.json, and the tensors that it names have as many parameters as the model is known for."""
    hf_config = load_hf_config(folders / "models" / name)
    entries = family_for(hf_config).entries(hf_config, range(hf_config.num_hidden_layers), True, True)
    counts = [math.prod(shape) for entry in entries if not entry.load_only for shape in entry.shapes]
    assert sum(counts) == PARAMETERS[name]
    said = MODELS[name].parameters.partition(",")[0]
    size = float(said[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[said[-1]]
    assert size == pytest.approx(sum(counts), rel=0.09)
