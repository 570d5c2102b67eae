"""Qwen3 of 4 billion parameters, dense."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

LAYOUTS = (Layout(HOPPER + BLACKWELL + GRACE, tp=2),)

RECIPE = Recipe(
    "Qwen3 4B",
    models=(
        Model("Qwen/Qwen3-4B", "4B", LAYOUTS),
        Model("Qwen/Qwen3-4B-Base", "4B", LAYOUTS),
        Model("Qwen/Qwen3-4B-Instruct-2507", "4B", LAYOUTS),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
