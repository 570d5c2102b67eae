"""An engine pool and prompts whose every step a test decides."""

import asyncio
from collections.abc import Callable

from miles.rollout.engine_pool import EnginePool
from miles.utils.types import Sample


class FakePool:
    """Behaves as EnginePool, but each sample ends as `plan(sample)` says, or by `finish` where that is None.

    A plan is a response text, an exception, or None. A sample that `hold` cuts off keeps `partial` tokens of its own.
    """

    def __init__(self, plan: Callable[[Sample], str | Exception | None] = lambda sample: "a", partial: int = 1) -> None:
        self.plan, self.partial = plan, partial
        self.version = "1"
        self.holds = 0
        self.requests: list[list[int]] = []
        self._waiting: dict[int, asyncio.Future] = {}
        self._released = asyncio.Event()
        self._released.set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> list[int]:
        """Indices of the samples being generated."""
        return sorted(self._waiting)

    def finish(self, *indices: int, response: str | Exception = "a") -> None:
        for index in indices:
            self._waiting.pop(index).set_result(response)

    async def complete(self, samples, parameters):
        self.requests.append([sample.index for sample in samples])
        self._in_flight += 1
        self._idle.clear()
        futures = {}
        try:
            if not self._released.is_set():
                for sample in samples:
                    sample.status = Sample.Status.ABORTED
                return
            for sample in samples:
                assert sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED), "finished samples are not asked"
                assert sample.index not in self._waiting, "a sample is generated twice at the same time"
                futures[sample.index] = self._waiting[sample.index] = asyncio.get_running_loop().create_future()
                if (planned := self.plan(sample)) is not None:
                    self.finish(sample.index, response=planned)
            answers = await asyncio.gather(*futures.values())
            for sample, answer in zip(samples, answers, strict=True):
                if isinstance(answer, Exception):
                    continue
                self._extend(sample, answer)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        finally:
            for index, future in futures.items():
                if self._waiting.get(index) is future:
                    del self._waiting[index]
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _extend(self, sample, answer):
        count = self.partial if answer is CUT_OFF else len(answer)
        sample.status = Sample.Status.ABORTED if answer is CUT_OFF else Sample.Status.COMPLETED
        sample.tokens = [*sample.tokens, *range(1000, 1000 + count)]
        sample.response += "." * count if answer is CUT_OFF else answer
        sample.response_length += count
        sample.loss_mask = [*(sample.loss_mask or []), *[1] * count]
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *[-0.5] * count]
        if count:
            sample.weight_versions.append(self.version)
            sample.weight_version_lengths.append(count)

    async def hold(self):
        self.holds += 1
        self._released.clear()
        self.finish(*self.waiting, response=CUT_OFF)
        await self._idle.wait()

    def release(self):
        self._released.set()

    async def wait_released(self):
        await self._released.wait()

    def take_metrics(self):
        return {"rollout/request_retries": 0.0}

    active = EnginePool.active


class _CutOff:
    pass


CUT_OFF = _CutOff()


class FakePrompts:
    """Groups of samples with the label "a", numbered from 0."""

    def __init__(self, size: int, group_index: int = 0) -> None:
        self.size, self.group_index = size, group_index

    def get_samples(self, num_groups):
        groups = []
        for _ in range(num_groups):
            first = self.group_index * self.size
            groups.append(
                [
                    Sample(group_index=self.group_index, index=first + i, prompt="p", tokens=[1, 2], label="a")
                    for i in range(self.size)
                ]
            )
            self.group_index += 1
        return groups


async def settle():
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)
