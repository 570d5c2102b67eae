"""`--rm-type remote_rm`: a service at `--rm-url` says what a response is worth.

It gets POST {"prompt", "response", "label"} as JSON, label null where there is none, and answers with JSON: a number,
an object of numbers (--reward-key names the one that trains), or null to abstain.
"""

import json
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from miles.rewards.reward import Reward

if TYPE_CHECKING:
    import asyncio

    from miles.config import RunConfig
    from miles.utils.types import Sample

BACKOFF_S = 0.5
LONGEST_ANSWER = 1 << 20  # bytes
_RETRIED_STATUS = (408, 429)
_SHOWN = 200  # characters of an answer in an error

# Requests in flight, of all groups of one event loop.
_slots: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = WeakKeyDictionary()


class RemoteRewardError(RuntimeError):
    """The service gave no usable answer."""


async def remote_reward(config: "RunConfig", sample: "Sample") -> Any:
    """What the service answers.

    At most `rm_max_concurrency` requests are in flight; one may take `rm_request_timeout` seconds, in which waiting for
    its turn does not count. A lost connection, a cut body, a timeout, HTTP 408, 429 and 5xx are tried
    `rm_request_retries` times more, 0.5, 1, 2, ... seconds apart.

    Raises:
        RemoteRewardError: the last attempt failed, or one has another status or an answer that is not JSON or over
            1 MiB.
    """
    import asyncio  # here, so that a command line is read without it

    url, loop = config.rm_url, asyncio.get_running_loop()
    assert url is not None, "the record says that it needs one"
    slots = _slots.setdefault(loop, asyncio.Semaphore(config.rm_max_concurrency))
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in range(config.rm_request_retries + 1):
        if attempt:
            await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            async with slots:
                status, answer = await _post(url, body, config.rm_request_timeout)
        except TimeoutError:
            failure = f"no answer within {config.rm_request_timeout:g} s (--rm-request-timeout)"
            continue
        except ConnectionError as error:
            failure = str(error)
            continue
        if status == 200:
            return _decode(url, answer)
        failure = f"HTTP {status}: {_start_of(answer)}"
        if status < 500 and status not in _RETRIED_STATUS:
            raise RemoteRewardError(f"{url}: {failure}")
    raise RemoteRewardError(f"{url}: {failure}, in the last of {config.rm_request_retries + 1} attempt(s)")


async def _post(url: str, body: dict, timeout_s: float) -> tuple[int, bytes]:
    """Status and body; a connection of its own, so that none is left behind in any event loop.

    Raises:
        TimeoutError: it took too long.
        ConnectionError: whatever else of the connection failed.
        RemoteRewardError: the body is too long.
    """
    import aiohttp  # Here, since the configuration reads the record: it would double the time that this takes.

    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.post(url, json=body, allow_redirects=False) as response,
        ):
            answer = bytearray()
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > LONGEST_ANSWER:
                    raise RemoteRewardError(f"{url}: HTTP {response.status} with a body of over {LONGEST_ANSWER} bytes")
            return response.status, bytes(answer)
    except TimeoutError:
        raise
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def _decode(url: str, answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise RemoteRewardError(f"{url}: the answer is not JSON: {_start_of(answer)}") from error


def _start_of(answer: bytes) -> str:
    return answer[:_SHOWN].decode(errors="replace")


REMOTE_RM = Reward(
    name="remote_rm",
    help="--rm-url is asked",
    judge=remote_reward,
    flags={"rm_url": "needs --rm-url, the address of its service, such as http://10.0.0.7:8000/reward"},
)
