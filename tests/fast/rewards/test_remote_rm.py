"""remote_rm against a real HTTP server that misbehaves, on a socket of its own."""

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager

import pytest

from miles.rewards import remote_rm
from miles.rewards.compute import compute_rewards
from miles.utils.types import Sample


class Server:
    """Answers requests in order by the steps of a script, the last one for ever: a step is given the connection."""

    def __init__(self, *script):
        self.script, self.bodies, self.running, self.most_running = list(script), [], 0, 0

    async def handle(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await step(writer)
        except ConnectionError:
            pass
        self.running -= 1
        writer.close()


def answers(body, status=200, length=None):
    async def step(writer):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data) if length is None else length}\r\n"
        head += "Content-Type: text/plain\r\nConnection: close\r\n"
        writer.write(head.encode() + b"\r\n" + data)
        await writer.drain()

    return step


def late(seconds, step):
    async def wait(writer):
        await asyncio.sleep(seconds)
        await step(writer)

    return wait


async def resets(writer):
    writer.transport.abort()


async def drips(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def floods(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(1000):
        writer.write(b"10000\r\n" + b"1" * 65536 + b"\r\n")
        await writer.drain()


async def redirects(writer):
    writer.write(b"HTTP/1.1 307 X\r\nLocation: /reward\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()


truncated = answers(b"1.", length=100)


@pytest.fixture
def ask(engine_config, monkeypatch):
    """Reward samples by a server with this script: (rewards, counts, server)."""
    monkeypatch.setattr(remote_rm, "BACKOFF_S", 0.01)

    async def ask(*script, samples=1, **changes):
        server = Server(*script)
        async with listening(server) as url:
            update = {"rm_type": "remote_rm", "rm_url": url, "label_key": None, "rm_request_timeout": 0.6, **changes}
            asked = [Sample(index=i, group_index=0, prompt="p", response=f"r{i}") for i in range(samples)]
            counts = await compute_rewards(engine_config.model_copy(update=update), asked)
        return [sample.reward for sample in asked], counts, server

    return ask


@asynccontextmanager
async def listening(server):
    async with await asyncio.start_server(server.handle, "127.0.0.1", 0) as listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/reward"


async def test_what_is_asked_and_answered(engine_config):
    server = Server(answers(0.5), answers({"score": 2, "why": "ä"}), answers(None), answers(True))
    async with listening(server) as url:
        update = {"rm_type": "remote_rm", "rm_url": url, "reward_key": "score", "rm_max_concurrency": 1}
        samples = [Sample(index=i, prompt="p", response="ä\U0001f600", label="l") for i in range(4)]
        counts = await compute_rewards(engine_config.model_copy(update=update), samples)
    assert [sample.reward for sample in samples] == [0.5, 2.0, None, 1.0]
    assert (counts.abstained, counts.errors) == (1, 0)
    assert server.bodies == [{"prompt": "p", "response": "ä\U0001f600", "label": "l"}] * 4
    assert samples[1].metadata["reward"] == {"score": 2, "why": "ä"}


@pytest.mark.parametrize(
    "failure",
    [
        answers(b"down", 500),
        answers(b"", 503),
        answers(b"", 429),
        resets,
        truncated,
        drips,
        late(1.5, answers(1)),
    ],
    ids=["500", "503", "429", "reset", "truncated", "drip", "hang"],
)
async def test_what_passes_is_tried_again(ask, failure):
    rewards, counts, server = await ask(failure, failure, answers(1.0), rm_request_retries=2)
    assert (rewards, counts.errors, len(server.bodies)) == ([1.0], 0, 3)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (answers(b"down", 500), "HTTP 500: down, in the last of 3 attempt"),
        (resets, "ServerDisconnectedError|ClientOSError|ConnectionResetError"),
        (truncated, "ClientPayloadError"),
        (drips, "no answer within 0.6 s .--rm-request-timeout., in the last of 3 attempt"),
        (late(1.5, answers(1)), "no answer within 0.6 s"),
    ],
    ids=["500", "reset", "truncated", "drip", "hang"],
)
async def test_what_does_not_pass_is_an_error_within_bounds(ask, failure, said):
    start = time.monotonic()
    rewards, counts, server = await ask(failure, rm_request_retries=2)
    assert (rewards, counts.errors, counts.abstained, len(server.bodies)) == ([None], 1, 0, 3)
    assert "RemoteRewardError: http://127.0.0.1" in counts.first_error
    assert re.search(said, counts.first_error)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answers(b"no such page", 404), "HTTP 404: no such page"),
        (redirects, "HTTP 307"),
        (answers(b"<html>"), "the answer is not JSON: <html>"),
        (answers(b"\xff"), "the answer is not JSON"),
        (answers(b""), "the answer is not JSON"),
        (answers(b"[" * 100_000), "the answer is not JSON"),
        (floods, "a body of over 1048576 bytes"),
        (answers([1]), "TypeError: a reward must be a number"),
        (answers("1"), "TypeError: a reward must be a number"),
        (answers(b"NaN"), "ValueError: the reward is nan"),
        (answers({"other": 1}), "--reward-key is not given"),
    ],
    ids=["404", "307", "html", "bytes", "empty", "deep", "flood", "list", "text", "nan", "key"],
)
async def test_a_wrong_answer_is_an_error_at_once(ask, answer, said):
    rewards, counts, server = await ask(answer, rm_request_timeout=5)
    assert (rewards, counts.errors, len(server.bodies)) == ([None], 1, 1)
    assert said in counts.first_error


async def test_only_so_many_requests_at_once_and_waiting_is_not_their_time(ask):
    rewards, counts, server = await ask(
        late(0.1, answers(1)), samples=40, rm_max_concurrency=4, rm_request_timeout=0.8, rm_request_retries=0
    )
    assert rewards == [1.0] * 40 and counts.errors == 0
    assert server.most_running == 4


async def test_a_server_that_is_not_there(engine_config, monkeypatch):
    monkeypatch.setattr(remote_rm, "BACKOFF_S", 0.01)
    update = {"rm_type": "remote_rm", "rm_url": "http://127.0.0.1:9/", "rm_request_retries": 1}
    sample = Sample(index=0, response="r")
    counts = await compute_rewards(engine_config.model_copy(update=update), [sample])
    assert counts.errors == 1 and "ClientConnectorError" in counts.first_error and sample.reward is None


def test_each_event_loop_has_its_own_connections(engine_config):
    async def once():
        async with listening(Server(answers(1))) as url:
            sample = Sample(index=0, response="r")
            update = {"rm_type": "remote_rm", "rm_url": url, "rm_max_concurrency": 1}
            await compute_rewards(engine_config.model_copy(update=update), [sample])
            return sample.reward

    assert [asyncio.run(once()) for _ in range(2)] == [1.0, 1.0]
