"""gpt-oss of 117 billion parameters, 5.1 billion of them active: 128 experts; MXFP4 weights are read as they are."""

from launcher import BLACKWELL, Layout, Model, Recipe, main

RECIPE = Recipe(
    "gpt-oss 120B",
    models=(
        Model(
            "openai/gpt-oss-120b",
            "117B, 5.1B active",
            (
                Layout(("H200", *BLACKWELL), nodes=4, tp=4, pp=2, ep=16, engine_gpus=8),
                Layout(("H100",), nodes=8, tp=4, pp=2, ep=32, engine_gpus=8),
                Layout(("GB300",), nodes=4, tp=4, ep=16, engine_gpus=4),
            ),
        ),
    ),
)

if __name__ == "__main__":
    main(RECIPE)
