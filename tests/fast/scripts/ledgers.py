"""Writes docs/recipes/ledgers.md: what `train.py --check` says of every layout.

python -m tests.fast.scripts.ledgers
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from miles.check.hardware import hardware_named
from miles.check.ledger import Ledger, ledger_of
from miles.check.parameters import read_model
from miles.check.seconds import total_seconds
from miles.config.resolve import resolve
from tests.fast.scripts.launching import ROOT, SCRIPTS, choices, make_folders, plan_of, published_config, recipe_of

from launcher.recipe import Model, Recipe  # isort: skip

PAGE = ROOT / "docs/recipes/ledgers.md"
HEAD = """\
# Ledgers of the recipes

What [`train.py --check`](../user-guide/check.md) reckons for every layout of the [scripts](index.md) in mode
normal, without a GPU and without weights. Written by `python -m tests.fast.scripts.ledgers`; a test keeps it
current. Memory is in GB, of the fullest GPU and node in the fullest phase, of what there is. An engine takes the
share of a GPU that the recipe gives it, and its keys what the weights leave. A step is all of its phases, at
assumed rates.

| model | nodes x GPUs | GPU | host | tokens in an engine's KV pool | step |
| --- | --- | --- | --- | --- | --- |
"""


def models() -> dict[str, tuple[Recipe, Model]]:
    """{name: (recipe, model)} of every published config.json."""
    recipes = [recipe_of(path) for path in SCRIPTS if path.stem != "run_tiny"]
    every = {model.name: (recipe, model) for recipe in recipes for model in recipe.models}
    return {name: pair for name, pair in every.items() if published_config(name).stem == name}


def ledgers(recipe: Recipe, model: Model, folder: Path) -> Iterator[tuple[str, Ledger]]:
    """Each layout on each of its hardware, with how a user asks for it. `folder` is one of `make_folders`."""
    for layout in model.layouts:
        counted = None
        for choice in choices(layout):
            config = resolve(plan_of(recipe, folder, model_name=model.name, **choice).train_command()[2:]).config
            counted = counted or read_model(config)  # the same whatever the hardware
            yield layout.written_for(choice["hardware"]), ledger_of(config, hardware_named(choice["hardware"]), counted)


def row(name: str, written: str, ledger: Ledger) -> str:
    """A row of the page."""
    hardware, engine = ledger.hardware, ledger.engine
    assert engine is not None
    gpu = f"{max(device.peak for device in ledger.devices) / 1e9:.0f} of {hardware.memory / 1e9:.0f}"
    host = f"{max(ledger.host.totals.values()) / 1e9:.0f} of {hardware.host_memory / 1e9:.0f}"
    if ledger.shortages:
        return f"| {name} | {written} | {gpu}: too much | {host} | {engine.tokens / 1e3:.0f}k | |"
    return f"| {name} | {written} | {gpu} | {host} | {engine.tokens / 1e3:.0f}k | {total_seconds(ledger):.0f} s |"


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folders(folder, [model for _, model in models().values()])
        rows = [
            row(name, written, ledger)
            for name, (recipe, model) in models().items()
            for written, ledger in ledgers(recipe, model, folder)
        ]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
