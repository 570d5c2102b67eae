"""A stand-in for an SGLang server whose answers go wrong as a script says."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer_of(ids, reason="length", log_probs=None, version="1"):
    """What SGLang answers for one sample."""
    log_probs = [-0.5] * len(ids) if log_probs is None else log_probs
    meta = {
        "finish_reason": {"type": reason},
        "completion_tokens": len(ids),
        "weight_version": version,
        "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs, ids, strict=False)],
    }
    return {"output_ids": list(ids), "meta_info": meta}


class MisbehavingServer:
    """Plays the handlers of `script`, one a request, the last one for ever.

    `seen` holds the bodies of the requests. Those to /abort_request are only counted, in `aborts`, and answered 200.
    """

    def __init__(self, *script: Handler) -> None:
        self.script = list(script) or [good]
        self.seen, self.aborts = [], 0
        self.aborted, self.arrived = asyncio.Event(), asyncio.Event()

    async def __aenter__(self):
        app = web.Application(client_max_size=2**26)
        app[SERVER] = self
        app.router.add_post("/abort_request", self._abort)
        app.router.add_route("*", "/{path:.*}", self._play)
        self._server = TestServer(app)
        await self._server.start_server(shutdown_timeout=0.1)
        self.url = str(self._server.make_url("")).rstrip("/")
        return self

    async def __aexit__(self, *_):
        await self._server.close()

    async def _play(self, request):
        self.seen.append(await request.json() if request.can_read_body else None)
        self.arrived.set()
        return await self.script[min(len(self.seen), len(self.script)) - 1](request)

    async def _abort(self, request):
        self.aborts += 1
        self.aborted.set()
        return web.Response()


SERVER = web.AppKey("server", MisbehavingServer)


def says(status=200, body=None):
    """A handler that answers `body` at once."""

    async def handler(request):
        return web.json_response(body, status=status)

    return handler


def writes(*ids, **options):
    """A handler that answers `ids` for each sample."""

    async def handler(request):
        return web.json_response([answer_of(ids, **options) for _ in (await request.json())["input_ids"]])

    return handler


good = writes(65, 66)


async def slow(request):
    """Late, but right."""
    await asyncio.sleep(0.3)
    return await good(request)


async def reset(request):
    """The connection is lost before the answer."""
    request.transport.abort()
    return web.Response()


async def truncated(request):
    """The connection is lost in the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'[{"output_ids": [1]}')
    request.transport.abort()
    return response


async def hangs(request):
    """No answer."""
    await asyncio.sleep(600)


async def cut_off(request):
    """Writes until it is told to abort."""
    await request.app[SERVER].aborted.wait()
    return await writes(65, reason="abort")(request)


async def not_json(request):
    return web.Response(text="[{", content_type="application/json")


async def one_too_few(request):
    return web.json_response([answer_of([65])] * (len((await request.json())["input_ids"]) - 1))
