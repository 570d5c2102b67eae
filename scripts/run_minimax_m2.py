"""MiniMax-M2 of 229 billion parameters, 10 billion of them active: 256 experts; FP8 weights are read as they are."""

from launcher import BLACKWELL, Layout, Model, Recipe, main

LAYOUTS = (
    Layout(("H200", *BLACKWELL), nodes=8, tp=4, pp=2, cp=2, ep=32, engine_gpus=8, max_tokens_per_gpu=8192),
    Layout(("GB300",), nodes=16, tp=4, pp=2, cp=2, ep=32, engine_gpus=4, max_tokens_per_gpu=8192),
)

RECIPE = Recipe(
    "MiniMax-M2",
    models=(
        Model("MiniMaxAI/MiniMax-M2", "229B, 10B active", LAYOUTS),
        Model("MiniMaxAI/MiniMax-M2.1", "229B, 10B active", LAYOUTS),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
