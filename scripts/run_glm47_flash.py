"""GLM-4.7-Flash of 30 billion parameters, 3 billion of them active: latent attention, 64 experts."""

from launcher import BLACKWELL, GRACE, Layout, Model, Recipe, main

RECIPE = Recipe(
    "GLM-4.7-Flash",
    models=(
        Model(
            "zai-org/GLM-4.7-Flash",
            "30B, 3B active",
            (
                Layout(("H200", *BLACKWELL), tp=4, ep=8, engine_gpus=4, max_tokens_per_gpu=16384),
                Layout(("H100",), nodes=2, tp=4, ep=8, engine_gpus=4),
                Layout(GRACE, nodes=2, tp=4, ep=8, engine_gpus=4, max_tokens_per_gpu=16384),
            ),
        ),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
