"""A server that answers as SGLang does and computes nothing: a response takes its tokens times --ms-per-token.

    python benchmarks/stand_in_server.py --port 29000 --ms-per-token 8

benchmarks/rollout.py starts it for --stand-in. All samples of a request are answered with the longest one; requests
don't slow each other down, so that a client's seconds are those of the waiting, and what it adds to it.
"""

import argparse
import asyncio
import functools
import random

import orjson
from aiohttp import web


@functools.cache
def reply(tokens: int) -> bytes:
    """What SGLang says of one sample, in its size and form."""
    ids = [random.randrange(40_000) for _ in range(tokens)]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": 30,
        "weight_version": "default",
        "num_retractions": 0,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "e2e_latency": 1.234,
        "output_token_logprobs": [[-5 * random.random(), one, None] for one in ids],
    }
    return orjson.dumps({"text": "word " * tokens, "output_ids": ids, "meta_info": meta})


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--port", type=int, required=True, help="on 127.0.0.1")
    cli.add_argument("--ms-per-token", type=float, required=True, help="milliseconds")
    options = cli.parse_args()

    async def generate(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        lengths = [parameters["max_new_tokens"] for parameters in body["sampling_params"]]
        await asyncio.sleep(max(lengths) * options.ms_per_token / 1000)
        return web.Response(body=b"[" + b",".join(map(reply, lengths)) + b"]", content_type="application/json")

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=2**28)
    app.add_routes([web.post("/generate", generate), web.post("/flush_cache", ready), web.get("/health", ready)])
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
