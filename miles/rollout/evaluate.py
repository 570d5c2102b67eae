"""Evaluation: every set is sampled and rewarded anew, beside training and without touching anything of it."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.config import RunConfig
from miles.rewards import built_in
from miles.rollout.base_types import RolloutFnEvalOutput
from miles.rollout.eval_sets import EvalSet, load_eval_sets
from miles.rollout.group_runner import GroupRunner, run_groups
from miles.rollout.hooks import Hooks, load_generate
from miles.rollout.metrics import eval_metrics
from miles.rollout.progress import Progress
from miles.utils.tasks import all_of
from miles.utils.types import Sample

logger = logging.getLogger(__name__)


class Evaluator:
    """The evaluation sets of a run; each evaluation samples all their prompts anew, all sets at the same time.

    Samples have indices and seeds of their own set, so that an evaluation neither uses up prompts that are trained on
    nor depends on when it takes place.

    Args:
        config: the run's configuration.
        tokenizer: a Hugging Face tokenizer.
        hooks: the user's functions.

    Raises:
        ValueError: a set is described wrongly, its prompts are unusable, or what its reward or generate function needs
            is missing.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, hooks: Hooks) -> None:
        self._config = config
        sets = load_eval_sets(config, tokenizer)
        self._sets = [(eval_set, _hooks_of(config, tokenizer, eval_set, hooks)) for eval_set in sets]

    async def run(self, rollout_id: int, runner_for: Callable[[Hooks], GroupRunner]) -> RolloutFnEvalOutput:
        """Sample and reward all sets. The first error ends all of it: nothing is left running.

        Args:
            rollout_id: the rollout after which it takes place, for the progress bars.
            runner_for: makes the runner of a set, for evaluation, with these functions of the user.

        Returns:
            The finished samples of each set by its name, and the metrics `eval/*`.

        Raises:
            RuntimeError: too many rewards or samples of a set failed, or a sample is missing.
        """
        results = await all_of([self._run_set(rollout_id, one, runner_for(hooks)) for one, hooks in self._sets])
        data = {one.name: samples for (one, _), samples in zip(self._sets, results, strict=True)}
        return RolloutFnEvalOutput(data, evaluation_metrics(self._config, data))

    async def _run_set(self, rollout_id: int, eval_set: EvalSet, runner: GroupRunner) -> list[Sample]:
        asked = eval_set.groups()
        total = sum(map(len, asked))
        progress = Progress(f"Evaluation {eval_set.name} after rollout {rollout_id}", total)
        try:
            groups = await run_groups(runner, asked, eval_set.sampling, progress)
        finally:
            progress.close()
        samples = [sample for group in groups for sample in group]
        if (answered := {sample.trajectory for sample in samples}) != set(range(total)):
            raise RuntimeError(
                f"evaluation {eval_set.name}: asked for samples 0 to {total - 1}, {len(answered)} came back"
            )
        return samples


def evaluation_metrics(config: RunConfig, data: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """The metrics `eval/*` of the finished samples of each set, by its name."""
    metrics: dict[str, float] = {}
    for name, samples in data.items():
        metrics |= eval_metrics(name, samples, pass_rates=config.log_passrate)
        if missing := sum(sample.reward is None for sample in samples):
            logger.warning("evaluation %s: %d of %d samples have no reward", name, missing, len(samples))
    return metrics


def _hooks_of(config: RunConfig, tokenizer: Any, eval_set: EvalSet, hooks: Hooks) -> Hooks:
    """`hooks` with the set's own generate function, once its reward is checked."""
    if (rm_type := eval_set.metadata.get("rm_type")) is not None:
        built_in(rm_type).check_machine()
    flag = f"evaluation set {eval_set.name}: custom_generate_function_path"
    return dataclasses.replace(hooks, generate=load_generate(config, tokenizer, eval_set.generate_path, flag))
