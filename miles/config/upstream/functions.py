"""Functions that Miles and slime ship, by dotted path, and what does their job here.

`slime.` in front reads `miles.`, where our own have the paths of Miles'.
"""

from typing import Any, NamedTuple


class Ours(NamedTuple):
    """What does the job of a function.

    Args:
        note: for the user, behind the flag.
        fields: which fields have which values then; that of the path itself is left out.
    """

    note: str
    fields: dict[str, Any] = {}


_DEFAULT = Ours("the default")
_MISMATCH = Ours("--use-tis and --use-rs do it", {"use_tis": True})
_MASKED = Ours("--use-tis --tis-mode mask does it", {"use_tis": True, "tis_mode": "mask"})
_FULLY = Ours("--fully-async does it", {"fully_async": True})

OURS: dict[str, Ours] = {
    "miles.rollout.sglang_rollout.generate_rollout": _DEFAULT,
    "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn": _DEFAULT,
    "miles.rollout.data_source.RolloutDataSourceWithBuffer": _DEFAULT,
    "miles.rollout.sft_rollout.generate_rollout": Ours("--loss-type sft_loss does it"),
    "miles.rollout.fully_async_rollout.generate_rollout_fully_async": _FULLY,
    "examples.fully_async.fully_async_rollout.generate_rollout_fully_async": _FULLY,
    "fully_async_rollout.generate_rollout_fully_async": _FULLY,
    "miles.backends.training_utils.loss_hub.corrections.icepop_function": _MASKED,
    "miles.backends.training_utils.loss.icepop_function": _MASKED,
    "miles.backends.megatron_utils.loss.icepop_function": _MASKED,
    "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": _MISMATCH,
    "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_fsdp": _MISMATCH,
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": _MISMATCH,
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_fsdp": _MISMATCH,
}

_TEACHER = "the tokens of a teacher as rewards; use --use-opd --opd-type sglang with --opd-teacher-urls"
_BENCHMARK = "a rollout that only measures; benchmarks/rollout.py does"

ABSENT_FUNCTIONS: dict[str, str] = {
    "miles.rollout.on_policy_distillation.reward_func": _TEACHER,
    "miles.rollout.on_policy_distillation.post_process_rewards": _TEACHER,
    "miles.rollout.sleep_rollout.sleep": _BENCHMARK,
    "miles.rollout.generate_hub.benchmarkers.generate_with_random_osl": _BENCHMARK,
}


def as_ours(path: str) -> str:
    """The dotted path as Miles spells it."""
    return "miles." + path.removeprefix("slime.") if path.startswith("slime.") else path
