"""GLM-4.5 and 4.7 of 355 billion parameters, 32 billion of them active, and GLM-4.5-Air."""

from launcher import BLACKWELL, Layout, Model, Recipe, main

LARGE = (
    Layout(("H200", *BLACKWELL), nodes=8, tp=8, pp=4, cp=2, ep=16, engine_gpus=8, max_tokens_per_gpu=8192),
    Layout(("GB300",), nodes=16, tp=4, pp=4, cp=2, ep=16, engine_gpus=4, max_tokens_per_gpu=8192),
)
AIR = (
    Layout(("H200", *BLACKWELL), nodes=4, tp=4, pp=2, ep=16, engine_gpus=8, max_tokens_per_gpu=16384),
    Layout(("GB300",), nodes=4, tp=4, pp=2, ep=8, engine_gpus=4, max_tokens_per_gpu=16384),
)

RECIPE = Recipe(
    "GLM-4.5 and 4.7",
    models=(
        Model("zai-org/GLM-4.5", "355B, 32B active", LARGE),
        Model("zai-org/GLM-4.7", "355B, 32B active", LARGE),
        Model("zai-org/GLM-4.5-Air", "106B, 12B active", AIR),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
