"""Writes docs/recipes/index.md: the scripts, their models and layouts, from the records.

python scripts/launcher/docs.py
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from launcher.options import Options, variable_of  # noqa: E402
from launcher.recipe import Layout, Model, Recipe  # noqa: E402

PAGE = ROOT / "docs/recipes/index.md"
TEXT = """\
# Recipes

Written by `python scripts/launcher/docs.py` from the records in `scripts/run_*.py`; a test keeps it current, and
another puts every layout below through all checks of the configuration, and through `--check` ([what it
says](ledgers.md)), with the published config.json.

    python scripts/run_qwen3_4b.py                            # download what is missing, then train
    python scripts/run_qwen3_4b.py --dry-run                  # print the commands, run none
    python scripts/run_qwen3_4b.py train --num-nodes 2 --extra-args "--lr 2e-6 --save-interval 50"
    python scripts/run_tiny.py                                # the same on a CPU, within two minutes

| subcommand | what it does |
| --- | --- |
| `prepare` | downloads (or makes) checkpoint and prompts, each only where it is not whole |
| `train` | starts or joins a [Ray cluster](../getting-started/cluster.md), and runs `train.py` on it; Ctrl-C ends it |
| `full-train` | both; so does a script without a subcommand |
| `check` | prints the memory of each phase and the time of a step on `--hardware`, or what is wrong; needs no GPU |

Quantised checkpoints need no conversion: [they are read as they are](../advanced/quantised-checkpoints.md). The
same `--run-id` again goes on from the run's newest checkpoint. `HF_TOKEN` and `WANDB_API_KEY` are read from the
environment, and never put on a command line or into a job's description; with the latter a run logs to W&B.

| option | variable | default | meaning |
| --- | --- | --- | --- |
{options}

## Layouts

Nodes x GPUs of a node. On a multiple of the nodes there are more data-parallel copies. `train` says which layouts
there are where it has none for `--hardware`, `--num-nodes` and `--num-gpus-per-node`. TP comes with sequence
parallelism; PP 8 (4, 3) has 4 layers on the first stage and 3 on the last. Trainer and engines take turns on all
GPUs (`--colocate`), but with `--rollout-num-nodes N` the engines have N nodes of their own, and the trainer's
layout is that of the others.

| script | `--model-name` | parameters | nodes x GPUs | TP | PP | CP | EP | GPUs of an engine | tokens a GPU |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{layouts}
{waiting}"""


def scripts() -> dict[str, Recipe]:
    """{name: recipe} of all scripts but the one for a CPU."""
    paths = sorted((ROOT / "scripts").glob("run_*.py"))
    names = [path.stem for path in paths if "RECIPE" in path.read_text() and path.stem != "run_tiny"]
    return {name: importlib.import_module(name).RECIPE for name in names}


def option_rows() -> Iterator[str]:
    """A row for each option."""
    for option in Options.__dataclass_fields__.values():
        flag = f"--{option.name.replace('_', '-')}"
        default = "the time" if option.name == "run_id" else option.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        shown = {None: "unset", "": "none"}.get(default, default)
        yield f"| `{flag}` | `{variable_of(option.name)}` | {shown} | {option.metadata['help']} |"


def layout_rows(name: str, recipe: Recipe) -> Iterator[str]:
    """A row for each layout of each set of models that share them."""
    for models in grouped(recipe.models):
        parameters = "; ".join(dict.fromkeys(model.parameters for model in models))
        head = f"`{name}.py` | {', '.join(model.name for model in models)} | {parameters}"
        for layout in models[0].layouts:
            yield f"| {head} | {places(layout)} | {sizes(layout)} |"
            head = " | | "


def grouped(models: tuple[Model, ...]) -> list[list[Model]]:
    """Models that stand beside each other and share layouts."""
    groups: list[list[Model]] = []
    for model in models:
        if groups and groups[-1][0].layouts == model.layouts:
            groups[-1].append(model)
        else:
            groups.append([model])
    return groups


def places(layout: Layout) -> str:
    """`8 x 8 H200, B200`; by the GPUs of a node, where these differ."""
    by_size: dict[int, list[str]] = {}
    for hardware in layout.hardware:
        by_size.setdefault(layout.gpus_on(hardware), []).append(hardware)
    return "; ".join(f"{layout.nodes} x {gpus} {', '.join(names)}" for gpus, names in by_size.items())


def sizes(layout: Layout) -> str:
    """Parallel sizes, engine and tokens, as columns."""
    ends = [str(end) for end in (layout.first_stage_layers, layout.last_stage_layers) if end]
    if layout.last_stage_layers and not layout.first_stage_layers:
        ends = [f"last {layout.last_stage_layers}"]
    stages = f"{layout.pp} ({', '.join(ends)})" if ends else str(layout.pp)
    return " | ".join(
        map(str, (layout.tp, stages, layout.cp, layout.ep, layout.engine_gpus, layout.max_tokens_per_gpu))
    )


def page() -> str:
    """The whole page."""
    recipes = scripts()
    rows = [row for name, recipe in recipes.items() for row in layout_rows(name, recipe)]
    waiting = [model for recipe in recipes.values() for model in recipe.models if model.waits_for]
    sentences = [f"\n{model.name} cannot be trained yet: {model.waits_for}.\n" for model in waiting]
    return TEXT.format(options="\n".join(option_rows()), layouts="\n".join(rows), waiting="".join(sentences))


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
