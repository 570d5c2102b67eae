"""The recipes of scripts/run_*.py, and folders in which their runs could start: with config.json, without weights."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts"))

from launcher.options import Options  # noqa: E402
from launcher.plan import Plan  # noqa: E402
from launcher.recipe import Layout, Model, Recipe  # noqa: E402
from launcher.tasks import TASKS  # noqa: E402

PUBLISHED = Path(__file__).with_name("published")
SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("run_*.py") if "RECIPE" in path.read_text())
# Models whose config.json says the same of their shape as another's.
SHAPED_LIKE = {
    "Qwen3-4B-Instruct-2507": "Qwen3-4B",
    "Qwen3-30B-A3B-Instruct-2507": "Qwen3-30B-A3B",
    "Qwen3-235B-A22B-Instruct-2507": "Qwen3-235B-A22B",
    "Qwen3-Next-80B-A3B-Thinking": "Qwen3-Next-80B-A3B-Instruct",
    "DeepSeek-R1-0528": "DeepSeek-R1",
    "DeepSeek-V3-0324": "DeepSeek-V3",
    "DeepSeek-V3.1": "DeepSeek-V3",
    "MiniMax-M2.1": "MiniMax-M2",
    "DeepSeek-V4-Flash-FP8": "DeepSeek-V4-Flash",
    "DeepSeek-V4-Pro-FP8": "DeepSeek-V4-Pro",
}


def module_of(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe_of(path: Path) -> Recipe:
    """What a script knows."""
    return module_of(path).RECIPE


def published_config(name: str) -> Path:
    """config.json of a model as it is published."""
    return PUBLISHED / f"{SHAPED_LIKE.get(name, name.removesuffix('-Base'))}.json"


def make_folders(folder: Path, models: list[Model]) -> None:
    """In `folder`, what `prepare` would leave there, without weights and rows."""
    for model in models:
        (folder / "models" / model.name).mkdir(parents=True)
        (folder / "models" / model.name / "config.json").write_text(published_config(model.name).read_text())
    for task in TASKS.values():
        for file in task.files:
            path = folder / "data" / file.folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def plan_of(recipe: Recipe, folder: Path, **options) -> Plan:
    """A plan in folders of `make_folders`."""
    places = {"model_dir": folder / "models", "data_dir": folder / "data", "output_dir": folder / "runs"}
    return Plan.of(recipe, Options(**places, **options))


def choices(layout: Layout) -> list[dict]:
    """The options that choose a layout, for each of its hardware."""
    return [
        {"hardware": name, "num_nodes": layout.nodes, "num_gpus_per_node": layout.gpus_on(name)}
        for name in layout.hardware
    ]
