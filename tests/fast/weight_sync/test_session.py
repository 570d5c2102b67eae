import contextlib
import logging

import pytest

from miles.engines.client import SGLangError
from miles.weight_sync.session import UpdateSession, delivery


class FakeClient:
    """Records calls; those named in `failing` raise. `running`: requests that it reports. busy: a flush is refused."""

    url = "http://engine"

    def __init__(self, *failing, running=0, busy=False):
        self.failing, self.calls, self.running, self.busy = failing, [], running, busy

    async def _call(self, name, *arguments):
        self.calls.append(" ".join([name, *arguments]))
        if name in self.failing:
            raise SGLangError(self.url, 500, "no", 1)

    async def pause(self, mode):
        await self._call("pause", mode)

    async def running_requests(self):
        await self._call("running_requests")
        return self.running

    async def flush_cache(self, timeout=60.0):
        await self._call("flush_cache")
        if self.busy:
            raise SGLangError(self.url, 400, "pending requests", 1)

    async def update_weight_version(self, version):
        await self._call("version", version)

    async def continue_(self):
        await self._call("continue_")

    async def deliver(self):
        await self._call("deliver")

    async def close(self):
        await self._call("close")


async def run(client, buckets, names=("a", "b", "c"), flush_cache=True, mode="abort"):
    session = UpdateSession(client, names, version=3, flush_cache=flush_cache, pause_mode=mode)
    try:
        await session.open()
        for bucket in buckets:
            session.touched = True
            await delivery(client.url, bucket, client.deliver())
            session.sent(bucket)
        await session.finish()
    finally:
        await session.release()


AFTER = ["deliver", "deliver", "version 3", "continue_", "close"]


@pytest.mark.parametrize(
    "mode, before",
    [
        ("abort", ["pause abort", "flush_cache"]),
        ("retract", ["flush_cache", "pause retract"]),
        ("in_place", ["flush_cache", "pause in_place"]),
    ],
)
async def test_order_of_an_update(mode, before):
    client = FakeClient()
    await run(client, [["a", "b"], ["c"]], mode=mode)
    assert client.calls == before + AFTER


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_cache_in_use_is_not_flushed_in_silence(mode, caplog):
    """SGLang answers 400 then, and an update that is told to flush ends it."""
    client = FakeClient(running=2, busy=True)
    with caplog.at_level(logging.WARNING):
        await run(client, [["a", "b"], ["c"]], mode=mode)
    assert client.calls == ["flush_cache", "running_requests", f"pause {mode}", *AFTER]
    assert f"goes on with 2 requests after the update (--pause-generation-mode {mode})" in caplog.text


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_requests_that_were_just_aborted_keep_no_cache_from_being_flushed(mode, caplog):
    """The engine still reports them: what it reports was written down before."""
    client = FakeClient(running=2)
    await run(client, [["a", "b"], ["c"]], mode=mode)
    assert client.calls == ["flush_cache", f"pause {mode}", *AFTER] and not caplog.records


@pytest.mark.parametrize("failing", [None, "pause", "deliver", "version"])
async def test_a_cache_whose_memory_is_away_is_not_touched(failing):
    client = FakeClient(failing)
    with pytest.raises(RuntimeError) if failing else contextlib.nullcontext():
        await run(client, [["a", "b", "c"]], flush_cache=False)
    assert client.calls[0] == "pause abort" and "flush_cache" not in client.calls
    assert failing or client.calls[1:] == ["deliver", "version 3", "continue_", "close"]


@pytest.mark.parametrize("failing", ["pause", "flush_cache", "deliver", "version"])
async def test_after_a_failed_update_an_engine_keeps_its_version_and_goes_on_only_if_it_is_whole(failing, caplog):
    client = FakeClient(failing)
    with pytest.raises(RuntimeError, match="http://engine"):
        await run(client, [["a", "b", "c"]])
    touched = failing in ("deliver", "version")
    assert client.calls.count("continue_") == (not touched)
    assert client.calls[-1] == "close"
    assert ("http://engine holds weights of two versions and stays paused" in caplog.text) == touched
    assert "version 3" not in client.calls or failing == "version"


async def test_the_error_of_a_bucket_names_engine_and_tensors():
    with pytest.raises(RuntimeError, match="http://engine did not take a bucket of 2 tensors, a to b: .*500"):
        await run(FakeClient("deliver"), [["a", "b"]])


async def test_the_first_error_is_kept_when_the_engine_is_gone():
    client = FakeClient("pause", "continue_")
    with pytest.raises(RuntimeError, match="http://engine: HTTP 500"):
        await run(client, [["a", "b", "c"]])
    assert client.calls[-1] == "close"


@pytest.mark.parametrize(
    "buckets, message",
    [
        ([["a", "b"]], "1 tensors were not sent to http://engine: c"),
        ([], "3 tensors were not sent"),
        ([["a"], ["a"]], "a was sent to http://engine twice"),
        ([["a", "x"]], "x was sent to http://engine twice or is not of this model"),
    ],
)
async def test_what_was_sent_is_counted_before_the_version_is_set(buckets, message):
    client = FakeClient()
    with pytest.raises(RuntimeError, match=message):
        await run(client, buckets)
    assert "version 3" not in client.calls and client.calls[-1] == "close"
