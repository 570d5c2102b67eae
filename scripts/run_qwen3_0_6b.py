"""Qwen3 of 0.6 billion parameters, dense: one GPU is enough."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

ANY = HOPPER + BLACKWELL + GRACE

RECIPE = Recipe(
    "Qwen3 0.6B",
    models=(
        Model("Qwen/Qwen3-0.6B", "0.6B", (Layout(ANY), Layout(ANY, gpus_per_node=1))),
        Model("Qwen/Qwen3-0.6B-Base", "0.6B", (Layout(ANY), Layout(ANY, gpus_per_node=1))),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
