"""Qwen3 of 30 billion parameters, 3 billion of them active: 128 experts."""

from launcher import BLACKWELL, GRACE, Layout, Model, Recipe, main

LAYOUTS = (
    Layout(("H200", *BLACKWELL), tp=4, ep=8, engine_gpus=4, max_tokens_per_gpu=16384),
    Layout(("H100",), nodes=2, tp=4, ep=8, engine_gpus=4),
    Layout(GRACE, nodes=2, tp=4, ep=8, engine_gpus=4, max_tokens_per_gpu=16384),
)

RECIPE = Recipe(
    "Qwen3 30B-A3B",
    models=(
        Model("Qwen/Qwen3-30B-A3B", "30B, 3B active", LAYOUTS),
        Model("Qwen/Qwen3-30B-A3B-Instruct-2507", "30B, 3B active", LAYOUTS),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
