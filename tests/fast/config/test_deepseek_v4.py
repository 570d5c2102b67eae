"""DeepSeek-V4 in its published sizes: the layouts that it is trained in resolve, and when its layers are recomputed."""

import json

import pytest

from miles.config.resolve import ConfigError, resolve
from tests.fast.published_deepseek_v4 import FLASH, FOUR_LAYERS, PRO

RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Those of Miles' own script: model, nodes, GPUs of each, trainer, GPUs of an engine.
LAYOUTS = {
    "one node": (FOUR_LAYERS, 1, 8, "--tensor-model-parallel-size 8 --expert-model-parallel-size 8", 4),
    "Flash, 8 x 4 GB300": (
        FLASH,
        8,
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --context-parallel-size 2 "
        "--expert-model-parallel-size 4 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 3",
        4,
    ),
    "Flash, 8 x 8 H200": (
        FLASH,
        8,
        8,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --expert-model-parallel-size 8 "
        "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 3",
        4,
    ),
    # Its engines are of 32 GPUs, and have a node to themselves here.
    "Pro, 32 x 8 H200": (
        PRO,
        32,
        8,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32 "
        "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6",
        8,
    ),
}


def flags(folder, fields, nodes, gpus, layout, engine, more=""):
    """A command line in the layout, without a GPU or weights."""
    (folder / "model" / "config.json").write_text(json.dumps(fields))
    return (
        "--device cuda --colocate --hf-checkpoint model --prompt-data train.jsonl --label-key answer --rm-type math "
        "--num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 4096 "
        "--advantage-estimator grpo --micro-batch-size 1 --bf16 --sequence-parallel --expert-tensor-parallel-size 1 "
        f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {gpus} --rollout-num-gpus-per-engine {engine} "
        f"--sglang-ep-size {engine} --sglang-mem-fraction-static 0.7 {layout} {more}"
    ).split()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_the_published_sizes(folder, name):
    fields, nodes, gpus, layout, engine = LAYOUTS[name]
    config = resolve(flags(folder, fields, nodes, gpus, layout, engine, RECOMPUTED)).config
    sizes = config.parallel_sizes
    assert sizes.tp * sizes.pp * sizes.cp * sizes.dp == nodes * gpus == config.world_size
    assert config.num_engines == nodes * gpus // engine


def test_a_layout_that_a_size_cannot_have(folder):
    layout = "--tensor-model-parallel-size 16 --expert-model-parallel-size 8"
    with pytest.raises(ConfigError, match="16 does not divide the model's o_groups 8"):
        resolve(flags(folder, FLASH, 2, 8, layout, 8))


@pytest.mark.parametrize(
    "more, granularity, why",
    [
        ("", "full", "11 GiB of residual streams in float32"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 2048", "full", "11 GiB"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 1024", None, None),
        ("--recompute-granularity selective", "selective", None),
    ],
)
def test_layers_are_recomputed_where_their_streams_would_not_fit(folder, more, granularity, why):
    fields, nodes, gpus, layout, engine = LAYOUTS["Flash, 8 x 4 GB300"]
    layout = layout.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 1")
    words = [word for word in flags(folder, fields, nodes, gpus, layout, engine, more) if word != "--sequence-parallel"]
    resolved = resolve(words)
    assert resolved.config.recompute_granularity == granularity
    if why is not None:
        assert why in resolved.provenance["recompute_granularity"]
    if granularity == "full":
        assert (resolved.config.recompute_method, resolved.config.recompute_num_layers) == ("uniform", 1)
