"""Gemma 3, the two that only read text. The download needs HF_TOKEN of an account that has taken Google's terms."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

# One key head: tensor parallelism has nothing to share out.
ANY = HOPPER + BLACKWELL + GRACE
LAYOUTS = (Layout(ANY), Layout(ANY, gpus_per_node=1))

RECIPE = Recipe(
    "Gemma 3",
    models=(Model("google/gemma-3-1b-it", "1B", LAYOUTS), Model("google/gemma-3-270m-it", "270M", LAYOUTS)),
    task="gsm8k",
)

if __name__ == "__main__":
    main(RECIPE)
