"""The engines as one: requests go to the least busy that lives, are sent again where that helps, and stop on demand."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from miles.config import RunConfig
from miles.engines.client import SGLangClient, SGLangError
from miles.rollout.answers import UnusableAnswer, end_token_ids, extend, read_answer
from miles.rollout.slots import NoServerLeft, Slots
from miles.utils.errors import UserError
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

WATCH_SECONDS = 3.0
BACKOFF_SECONDS = 0.5
# An abort that overtakes its request finds nothing to abort: it is repeated this often, until all have answered.
ABORT_AGAIN_SECONDS = 0.25
HOLD_SECONDS = 120.0
# A connection is lost before the server's process has ended: its end, and why, is known up to this much later.
END_SECONDS = 3.0
END_POLL_SECONDS = 0.5

Request = tuple[Sample, dict[str, Any]]


class EnginesLost(RuntimeError):
    """No engine is left, or their router has died. The message says why."""


class RequestFailed(RuntimeError):
    """Some samples got no usable answer. Other engines and other samples are not concerned."""


class EnginePool:
    """Sends requests for samples to one or more engines.

    Args:
        config: the run's configuration.
        clients: one an engine, or one of a router; requests go to these.
        limit: samples in flight at most, of each client.
        tokenizer: for the text of a response.
        check_engines: returns the clients (of `clients` and `engines`) that get no requests for now, with the reason.
            Called every few seconds while requests run, and when one fails; who is not among them any more is taken
            back.
        engines: one an engine, where `clients` is a router: what runs is aborted there. None: `clients`.
        standing_still: returns the engines that do not answer, with what is known of it: for the message of `hold`.

    Attributes:
        tokenizer: as given.
        end_ids: the model's own end tokens; they end every response.
        holds: calls of `hold` so far. Nothing is cut off while it stays the same.
        shared: what generate functions make once, for all that generates by this pool; each has a key of its own.
    """

    def __init__(
        self,
        config: RunConfig,
        clients: Sequence[SGLangClient],
        limit: int,
        tokenizer: Any,
        check_engines: Callable[[], Awaitable[Mapping[SGLangClient, BaseException]]],
        engines: Sequence[SGLangClient] | None = None,
        standing_still: Callable[[], Mapping[SGLangClient, str]] = dict,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_token_ids(config.hf_checkpoint, tokenizer)
        self._clients = list(clients)
        self._slots = Slots(clients, limit)
        self._engines = list(clients if engines is None else engines)
        self._check_engines = check_engines
        self._standing_still = standing_still
        self._out: Mapping[SGLangClient, BaseException] = {}
        self._asked: Counter[SGLangClient] = Counter()
        self._checking: asyncio.Task[None] | None = None
        self._last_check = float("-inf")
        self._failing: set[SGLangClient] = set()
        self._retries = config.rollout_request_retries
        self._skip_special_tokens = config.rollout_skip_special_tokens
        self._in_flight = 0
        self._idle, self._held, self._released = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._released.set()
        self._sent_again = 0
        self.holds = 0
        self.shared: dict[str, Any] = {}

    @property
    def in_flight(self) -> int:
        """Samples that `complete` is at work on, waiting ones too."""
        return self._in_flight

    def take_metrics(self) -> dict[str, float]:
        """`rollout/request_retries`: requests sent again since the last call of this."""
        count, self._sent_again = self._sent_again, 0
        return {"rollout/request_retries": float(count)}

    async def complete(self, samples: Sequence[Sample], parameters: Sequence[Mapping[str, Any]]) -> None:
        """Extend each sample, in place, by one completion of its `tokens`; one request for all of them.

        Afterwards each is COMPLETED (it ended), TRUNCATED (it has the `max_new_tokens` of its parameters, which may be
        0), or ABORTED: cut off by `hold`, with what came until then. While held, nothing is sent and all become ABORTED
        at once. What an engine aborts by itself is sent again from the start.

        Args:
            samples: with tokens; earlier response tokens have their log-probabilities.
            parameters: SGLang's sampling parameters, of each sample; with max_new_tokens. Copied, not edited.

        Raises:
            RequestFailed: a request was refused, or failed --rollout-request-retries times more. Samples that got an
                answer have it (COMPLETED or TRUNCATED), the others are as they were.
            EnginesLost: no engine is left.
        """
        missing = []
        for sample, given in zip(samples, parameters, strict=True):
            sample.validate()
            if sample.response_length and sample.rollout_log_probs is None:
                raise UserError(
                    f"sample {sample.index} has a response without rollout_log_probs: it can't be continued"
                )
            if given["max_new_tokens"] < 1:
                sample.status = Sample.Status.TRUNCATED
            else:
                missing.append((sample, self._with_end_ids(given)))
        self._in_flight += len(samples)
        self._idle.clear()
        try:
            for sample, _ in await self._complete(missing):
                sample.status = Sample.Status.ABORTED
        finally:
            self._in_flight -= len(samples)
            if self._in_flight == 0:
                self._idle.set()

    async def hold(self) -> None:
        """Stop generating: nothing more is sent, what runs is aborted; returns once no request is in flight.

        Holding twice is holding once.

        Raises:
            RuntimeError: engines, which are named, have not answered 120 seconds after they were told to abort.
        """
        self.holds += 1
        self._released.clear()
        self._held.set()
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                await asyncio.gather(*map(self._abort_until_idle, self._engines))
                await self._idle.wait()
        except TimeoutError:
            asked = ", ".join(f"{count} at {client.url}" for client, count in self._asked.items() if count)
            silent = "".join(f"; {client.url} {what}" for client, what in self._standing_still().items())
            raise RuntimeError(
                f"{self._in_flight} samples are still in flight {HOLD_SECONDS:g} s after all requests were to be "
                f"aborted: {asked or 'none at an engine'}{silent}"
            ) from None

    def release(self) -> None:
        """End `hold`: requests are sent again."""
        self._held.clear()
        self._released.set()

    async def wait_released(self) -> None:
        """Return once nothing holds."""
        await self._released.wait()

    async def wait_held(self) -> None:
        """Return once it is held."""
        await self._held.wait()

    @contextmanager
    def active(self, should_stop: Callable[[], bool] | None = None) -> Iterator["EnginePool"]:
        """Make this pool the one of `current()`, and `should_stop` the function of `stopping()`, in this context."""
        token = _current.set((self, should_stop or _never))
        try:
            yield self
        finally:
            _current.reset(token)

    def _with_end_ids(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if "" in _stop_texts(given):
            raise UserError("the sampling parameters' stop holds an empty text, which ends every response at once")
        return {**given, "stop_token_ids": sorted(self.end_ids.union(given.get("stop_token_ids") or ()))}

    async def _complete(self, missing: list[Request]) -> list[Request]:
        """Returns those that `hold` left without an answer, or with part of one."""
        failed_at: list[SGLangClient] = []
        while missing and not self._held.is_set():
            try:
                async with self._slots.take(len(missing), failed_at) as client:
                    if self._held.is_set():
                        break
                    missing, error = await self._ask(client, missing)
            except NoServerLeft as lost:
                raise EnginesLost(str(lost)) from lost
            if error is None or self._held.is_set():
                break
            if isinstance(error, SGLangError) and error.refused:
                raise RequestFailed(f"{_names(missing)}: {error}") from error
            await self._check()
            last = len(failed_at) == self._retries
            if client in self._slots and not (last and await self._ends(client, error)):
                failed_at.append(client)
                if last:
                    raise RequestFailed(
                        f"{_names(missing)}: no usable answer in {self._retries + 1} requests "
                        f"(--rollout-request-retries {self._retries}); the last one: {error}"
                    ) from error
                self._warn(client, f"it fails requests, which are sent again: {error}")
                self._slots.shun(client)
                if not self._slots.others(failed_at):
                    await _happens(self._held, BACKOFF_SECONDS * 2 ** (len(failed_at) - 1))
            self._sent_again += 1
        return missing

    async def _ask(self, client: SGLangClient, requests: list[Request]) -> tuple[list[Request], Exception | None]:
        """Send them once, and extend the samples that got an answer; returns the others, with what went wrong."""
        self._asked[client] += len(requests)
        try:
            replies = await self._watched(
                client,
                client.generate([sample.tokens for sample, _ in requests], [given for _, given in requests]),
            )
        except SGLangError as error:
            return requests, error
        finally:
            self._asked[client] -= len(requests)
        missing: list[Request] = []
        last: Exception | None = None
        for (sample, given), reply in zip(requests, replies, strict=True):
            try:
                self._extend(sample, given, reply)
            except (SGLangError, UnusableAnswer) as problem:
                missing.append((sample, given))
                last = problem
        if last is None:
            self._failing.discard(client)
            self._slots.trust(client)
        return missing, last

    def _extend(self, sample: Sample, given: Mapping[str, Any], reply: dict | SGLangError) -> None:
        if isinstance(reply, SGLangError):
            raise reply
        answer = read_answer(reply)
        if answer.aborted and not self._held.is_set():
            raise UnusableAnswer("it aborted the request")
        extend(
            sample,
            answer,
            tokenizer=self.tokenizer,
            room=given["max_new_tokens"],
            end_ids=self.end_ids,
            stop_ids=frozenset() if given.get("ignore_eos") else frozenset(given["stop_token_ids"]),
            stop_texts=_stop_texts(given),
            skip_special_tokens=self._skip_special_tokens,
        )

    async def _watched[T](self, client: SGLangClient, call: Awaitable[T]) -> T:
        """The result of `call`; SGLangError once its server is out: a lost host closes no connection."""
        request, look = asyncio.ensure_future(call), None
        try:
            while not (await asyncio.wait({request}, timeout=WATCH_SECONDS))[0]:
                # Not awaited: another engine may be slow to say how it is.
                if look is not None and look.done():
                    look.result()
                if client not in self._slots:
                    reason = self._out.get(client, "no engine is left")
                    raise SGLangError(client.url, None, f"it was given up: {reason}", 1)
                if asyncio.get_running_loop().time() - self._last_check >= WATCH_SECONDS:
                    look = self._look()
            return request.result()
        finally:
            if not request.done():
                request.cancel()
                await asyncio.wait({request})

    async def _check(self) -> None:
        """See which servers are out."""
        await asyncio.shield(self._look())

    def _look(self) -> "asyncio.Task[None]":
        """One look serves all who ask meanwhile."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self._see_who_is_out())
        return self._checking

    async def _see_who_is_out(self) -> None:
        out = await self._check_engines()
        self._last_check = asyncio.get_running_loop().time()
        before, self._out = self._out, dict(out)
        for client in out.keys() - before.keys():
            logger.error("%s gets no more requests: %s", client.url, out[client])
        for client in before.keys() - out.keys():
            logger.warning("%s gets requests again", client.url)
        reasons = "; ".join(f"{client.url}: {reason}" for client, reason in out.items())
        # A router without engines is of no use.
        no_engine = all(engine in out for engine in self._engines)
        for client in self._clients:
            if client in out or no_engine:
                if client in self._slots:
                    self._slots.remove(client, f"no engine is left; {reasons}")
            elif client not in self._slots:
                self._slots.take_back(client)

    async def _ends(self, client: SGLangClient, error: Exception) -> bool:
        """Whether a server whose connection was lost turns out to have ended, unless `hold` comes first: True, too."""
        if not isinstance(error, SGLangError) or error.status is not None:
            return False
        deadline = asyncio.get_running_loop().time() + END_SECONDS
        while client in self._slots and not await _happens(self._held, END_POLL_SECONDS):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await self._check()
        return True

    async def _abort_until_idle(self, engine: SGLangClient) -> None:
        # Once at least: a request whose caller gave up runs on for seconds.
        while engine not in self._out:
            await self._abort(engine)
            if await _happens(self._idle, ABORT_AGAIN_SECONDS):
                return

    async def _abort(self, engine: SGLangClient) -> None:
        try:
            await engine.abort()
        except SGLangError as error:
            self._warn(engine, f"it takes no abort: {error}")
            await self._check()

    def _warn(self, client: SGLangClient, what: str) -> None:
        """One line, however many requests it fails before it answers again."""
        if client not in self._failing:
            self._failing.add(client)
            logger.warning("%s: %s", client.url, what)


def _stop_texts(given: Mapping[str, Any]) -> Sequence[str]:
    stop = given.get("stop")
    return [stop] if isinstance(stop, str) else stop or ()


def _names(requests: list[Request]) -> str:
    return f"sample(s) {[sample.index for sample, _ in requests]} of group {requests[0][0].group_index}"


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether `event` is there within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _never() -> bool:
    return False


_current: ContextVar[tuple[EnginePool, Callable[[], bool]]] = ContextVar("engine pool")


def current() -> EnginePool:
    """The pool of the rollout or evaluation that calls this function: custom generate functions ask it."""
    return _of_context()[0]


def stopping() -> Callable[[], bool]:
    """What `active` was given: says whether the rollout is about to end, so that nothing is worth going on with."""
    return _of_context()[1]


def _of_context() -> tuple[EnginePool, Callable[[], bool]]:
    pool_and_stop = _current.get(None)
    if pool_and_stop is None:
        raise RuntimeError("there are no engines here: generate functions are called by a rollout or an evaluation")
    return pool_and_stop
