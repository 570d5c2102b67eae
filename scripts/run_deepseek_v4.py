"""DeepSeek-V4 Flash and Pro, with the subcommands and layouts that Miles users know; weights are read as they are.

Engine and trainer hold bf16 weights: an engine of Flash needs 569 GB, the 4 or 8 GPUs of a node.
"""

from launcher import Layout, Model, Recipe, main
from launcher.app import prepare
from launcher.plan import Plan
from launcher.prepare import copy_steps, run_steps

from miles.utils.errors import UserError

TOKENS = {"max_tokens_per_gpu": 2048}
# 43 layers: one stage of 4, six of 6, one of 3.
FLASH = {"pp": 8, "first_stage_layers": 4, "last_stage_layers": 3, **TOKENS}
# 61 layers: one stage of 7, six of 8, one of 6.
PRO = {"pp": 8, "first_stage_layers": 7, "last_stage_layers": 6, **TOKENS}

FLASH_LAYOUTS = (
    Layout(("H200", "B200", "B300"), nodes=8, tp=8, ep=8, engine_gpus=8, **FLASH),
    Layout(("GB300",), nodes=8, tp=2, cp=2, ep=4, engine_gpus=4, **FLASH),
)
PRO_LAYOUTS = (Layout(("H200", "B200", "B300"), nodes=32, tp=8, ep=32, engine_gpus=8, **PRO),)
CUT_LAYOUTS = (
    Layout(("H200", "B200", "B300"), tp=8, ep=8, engine_gpus=4, **TOKENS),
    Layout(("GB300",), tp=4, ep=4, engine_gpus=4, **TOKENS),
)
WAITS_FOR = (
    "its bf16 weights take 3146 GB, and an engine lives on one node; that needs engines over several nodes, which "
    "Miles does not have"
)

RECIPE = Recipe(
    "DeepSeek-V4",
    models=(
        Model("deepseek-ai/DeepSeek-V4-Flash", "284B, 13B active", FLASH_LAYOUTS),
        Model("sgl-project/DeepSeek-V4-Flash-FP8", "284B, 13B active", FLASH_LAYOUTS),
        # Its first four layers, to see that everything runs.
        Model("Pinaster/DeepSeek-V4-Flash-FP8-4layer", "27B", CUT_LAYOUTS),
        Model("deepseek-ai/DeepSeek-V4-Pro", "1.6T, 49B active", PRO_LAYOUTS, waits_for=WAITS_FOR),
        Model("sgl-project/DeepSeek-V4-Pro-FP8", "1.6T, 49B active", PRO_LAYOUTS, waits_for=WAITS_FOR),
    ),
    flags={
        "rollout_max_response_len": 4096,
        "rollout_temperature": 0.8,
        "over_sampling_batch_size": 64,
        "dynamic_sampling_filter_path": "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    },
)


def prepare_checkpoint(plan: Plan) -> None:
    """Nothing: the trainer reads the published weights, whatever their format, into its own layout."""
    print("# the trainer reads the published FP8 and FP4 weights into its own layout: there is nothing to convert")


def prepare_mxfp8(plan: Plan) -> None:
    """MXFP8 engines: Miles has none."""
    raise UserError("prepare-mxfp8: engines hold bf16 weights here; leave it out, and train with `train`")


def prepare_copy(plan: Plan) -> None:
    """Copy the checkpoint to --model-local-dir on this node."""
    if plan.options.model_local_dir is None:
        raise UserError("prepare-cp copies the checkpoint to --model-local-dir of this node; give that")
    run_steps(copy_steps(plan), plan.options.dry_run)


ACTIONS = {
    "prepare-download": prepare,
    "prepare-single": prepare_checkpoint,
    "prepare-mxfp8": prepare_mxfp8,
    "prepare-spmd": prepare_checkpoint,
    "prepare-cp": prepare_copy,
}

if __name__ == "__main__":
    main(RECIPE, ACTIONS)
