"""Qwen3 of 8 billion parameters, dense."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

LAYOUTS = (Layout(HOPPER + BLACKWELL + GRACE, tp=2),)

RECIPE = Recipe(
    "Qwen3 8B",
    models=(Model("Qwen/Qwen3-8B", "8B", LAYOUTS), Model("Qwen/Qwen3-8B-Base", "8B", LAYOUTS)),
)

if __name__ == "__main__":
    main(RECIPE)
