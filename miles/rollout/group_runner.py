"""One group of samples from its prompt to its rewards: generation, retries, rewards, teacher."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.config import RunConfig
from miles.rewards.compute import RewardCounts, check_errors, compute_rewards
from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate import Sampling
from miles.rollout.hooks import Hooks
from miles.rollout.progress import Progress
from miles.rollout.sample_buffer import Group, as_asked, trajectories
from miles.rollout.teacher import Teacher
from miles.utils.errors import UserError
from miles.utils.tasks import all_of
from miles.utils.types import Sample

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """What went wrong in the groups that were finished so far.

    Attributes:
        rewards: counts of each group.
        failed: samples whose generation failed for good; `first_failure` names one.
        retried: generations that failed and were tried again.
    """

    rewards: list[RewardCounts] = field(default_factory=list)
    failed: int = 0
    first_failure: str | None = None
    retried: int = 0

    def check(self, config: RunConfig, samples: int) -> None:
        """Compare with the bounds on failed generations and rewards, as shares of `samples` or of those so far.

        Raises: UserError above one of them, with the first error.
        """
        samples = max(samples, sum(counts.samples for counts in self.rewards) + self.failed)
        if self.failed > config.max_failed_sample_fraction * samples:
            raise UserError(
                f"the generation of {self.failed} of {samples} samples failed; --max-failed-sample-fraction allows "
                f"{config.max_failed_sample_fraction:g}. The first: {self.first_failure}"
            )
        if self.reward_errors > config.max_reward_error_fraction * samples:
            try:
                check_errors(self.rewards, config.max_reward_error_fraction)
            except UserError as error:
                raise UserError(f"{config.custom_rm_path or config.rm_type}: {error}") from None

    def metrics(self, config: RunConfig) -> dict[str, float]:
        """As `rollout/*`."""
        metrics = {"rollout/failed_samples": float(self.failed), "rollout/sample_retries": float(self.retried)}
        rewarded = sum(counts.samples for counts in self.rewards)
        if config.has_reward and rewarded:
            metrics["rollout/reward_error_ratio"] = self.reward_errors / rewarded
        return metrics

    @property
    def reward_errors(self) -> int:
        """Samples whose reward failed."""
        return sum(counts.errors for counts in self.rewards)


class GroupRunner:
    """Takes groups through generation and rewards, one call of `run` a group, any number at once.

    Args:
        config: the run's configuration.
        pool: the engines.
        hooks: `generate` is used.
        teacher: looks at every finished group of a rollout; None: there is none.
        evaluation: score as --eval-* says.

    Attributes:
        tally: what went wrong in all groups so far; replace it to start anew.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: EnginePool,
        hooks: Hooks,
        teacher: Teacher | None = None,
        *,
        evaluation: bool = False,
    ) -> None:
        self._config = config
        self._pool = pool
        self._hooks = hooks
        self._teacher = teacher
        self._evaluation = evaluation
        self.tally = Tally()

    def check(self, samples: int) -> None:
        """Raise RuntimeError if too many of the samples so far, taken as `samples` at least, failed."""
        self.tally.check(self._config, samples)

    async def run(self, group: Group, sampling: Sampling, should_stop: Callable[[], bool]) -> Group:
        """Finish a group, in place: the list holds at any time what could be saved and gone on with.

        A sample that the pool cut off goes on once the pool is released, or once `should_stop` says so stays as it is.
        Without --partial-rollout it loses its response first. A sample whose generation fails is asked again, at most
        --rollout-sample-retries times; then it is FAILED and removed, without response and reward. Finished samples are
        rewarded all together; pieces of one trajectory share the reward of its last one, and a reward that a generate
        function has set stays.

        Returns:
            The same list. Either all samples are completed, truncated or failed, and rewarded, or some are aborted or
            pending: only if should_stop().

        Raises:
            EnginesLost: no engine is left.
            ValueError, RuntimeError: a prompt leaves no room for a response; the teacher failed.
        """
        members = [_Member(pieces) for pieces in trajectories(group)]

        def update() -> None:
            group[:] = [sample for member in members for sample in member.pieces]

        parts = [members] if self._hooks.generate.together else [[member] for member in members]
        await all_of([self._finish(part, sampling, should_stop, update) for part in parts])
        if all(member.is_finished for member in members):
            if self._config.mask_offpolicy_in_partial_rollout and not self._evaluation:
                for sample in group:
                    mask_older_versions(sample)
            await self._score(group)
        return group

    async def _finish(
        self,
        members: list["_Member"],
        sampling: Sampling,
        should_stop: Callable[[], bool],
        update: Callable[[], None],
    ) -> None:
        """Generate for these members until all are finished, or should_stop()."""
        while (missing := [member for member in members if not member.is_finished]) and not should_stop():
            await self._pool.wait_released()
            if should_stop():
                break
            await self._attempt(missing, sampling, should_stop)
            for member in missing:
                if member.is_cut_off and not self._config.partial_rollout:
                    member.start_anew()
            update()

    async def _attempt(self, members: list["_Member"], sampling: Sampling, should_stop: Callable[[], bool]) -> None:
        """Afterwards each member is finished, cut off, or pending with one more failure."""
        samples = [member.pieces[0] for member in members]
        parameters = [sampling.parameters(sample) for sample in samples]
        holds = self._pool.holds
        with self._pool.active(should_stop):
            results = await self._hooks.generate(self._config, samples, parameters)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, Exception):
                self._failed(member, str(result), result)
                continue
            statuses = {piece.status for piece in result}
            if Sample.Status.FAILED in statuses:
                self._failed(member, "the generate function returned it as failed")
            elif Sample.Status.ABORTED not in statuses:
                member.pieces = result
            elif self._pool.holds == holds:
                self._failed(member, "the generate function returned it as aborted, and nothing had cut it off")
            elif len(result) == 1:
                member.pieces = result
            else:  # several pieces can't be gone on with as one sample
                member.start_anew()
                member.pieces[0].status = Sample.Status.ABORTED

    def _failed(self, member: "_Member", reason: str, error: Exception | None = None) -> None:
        """An attempt failed: the member is asked again, or has had its chances and is FAILED."""
        member.start_anew()
        member.failures += 1
        if member.failures <= self._config.rollout_sample_retries:
            self.tally.retried += 1
            return
        sample = member.pieces[0]
        failure = f"sample {sample.index} of group {sample.group_index}: {reason}"
        trace = error if self.tally.failed == 0 else None
        logger.warning("the generation failed %d times for %s", member.failures, failure, exc_info=trace)
        self.tally.failed += 1
        self.tally.first_failure = self.tally.first_failure or failure
        sample.status = Sample.Status.FAILED
        sample.remove_sample = True
        sample.loss_mask, sample.rollout_log_probs = [], []
        if self._teacher is not None:
            sample.teacher_log_probs = []

    async def _score(self, group: Group) -> None:
        """Reward the finished samples of a group, while the teacher looks at them."""
        finished = [sample for sample in group if sample.status is not Sample.Status.FAILED]
        work: list[Awaitable[Any]] = [self._reward(finished)]
        if self._teacher is not None and finished:
            work.append(self._teacher.score(finished))
        await all_of(work)

    async def _reward(self, samples: list[Sample]) -> None:
        missing = [pieces for pieces in trajectories(samples) if pieces[-1].reward is None]
        if not missing:
            return
        counts = await compute_rewards(self._config, [pieces[-1] for pieces in missing], evaluation=self._evaluation)
        for pieces in missing:
            for piece in pieces:
                piece.reward = pieces[-1].reward
        self.tally.rewards.append(counts)


class _Member:
    """A trajectory on its way: one sample until a generate function makes several pieces of it."""

    def __init__(self, pieces: list[Sample]) -> None:
        self.pieces = pieces
        self.failures = 0

    @property
    def is_finished(self) -> bool:
        return all(piece.is_finished for piece in self.pieces)

    @property
    def is_cut_off(self) -> bool:
        return any(piece.status is Sample.Status.ABORTED for piece in self.pieces)

    def start_anew(self) -> None:
        self.pieces = [as_asked(self.pieces)]


async def run_groups(
    runner: GroupRunner, groups: Sequence[Group], sampling: Sampling, progress: Progress | None = None
) -> list[Group]:
    """Finish all groups; the first error ends all of it: nothing is left running.

    Args:
        runner: one of its own, whose tally is that of these groups.
        progress: gets the samples of each finished group; the caller closes it.

    Raises:
        RuntimeError: too many generations or rewards failed, no engine is left, or what else `GroupRunner.run` raises.
    """
    samples = sum(map(len, groups))

    async def run(group: Group) -> Group:
        size = len(group)
        await runner.run(group, sampling, lambda: False)
        runner.check(samples)
        if progress is not None:
            progress.update(size)
        return group

    return await all_of([run(group) for group in groups])


def mask_older_versions(sample: Sample) -> None:
    """Take the response tokens that other versions of the weights than the newest wrote out of the loss mask.

    Raises: ValueError if it isn't known which these are.
    """
    versions = sample.weight_versions
    if len(set(versions)) < 2:
        return
    if len(sample.weight_version_lengths) != len(versions):
        raise UserError(
            f"--mask-offpolicy-in-partial-rollout: sample {sample.index} has weight_versions {', '.join(versions)} and "
            "no weight_version_lengths, which say what each wrote; --custom-generate-function-path must set them, too"
        )
    newest = np.zeros(sample.response_length, np.int8)
    written = np.repeat([version == versions[-1] for version in versions], sample.weight_version_lengths)
    newest[: len(written)] = written
    sample.loss_mask = sample.mask * newest
