"""gpt-oss of 21 billion parameters, 3.6 billion of them active: 32 experts; MXFP4 weights are read as they are."""

from launcher import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe, main

RECIPE = Recipe(
    "gpt-oss 20B",
    models=(
        Model(
            "openai/gpt-oss-20b",
            "21B, 3.6B active",
            (Layout(HOPPER + BLACKWELL, tp=4, ep=8, engine_gpus=4), Layout(GRACE, tp=4, ep=4, engine_gpus=4)),
        ),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
