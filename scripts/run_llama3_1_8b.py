"""Llama 3.1 of 8 billion parameters, dense. The download needs HF_TOKEN of an account that has taken Meta's terms."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

RECIPE = Recipe(
    "Llama 3.1 8B",
    models=(Model("meta-llama/Llama-3.1-8B-Instruct", "8B", (Layout(HOPPER + BLACKWELL + GRACE, tp=2),)),),
)

if __name__ == "__main__":
    main(RECIPE)
