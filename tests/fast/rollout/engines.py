"""A pool of real clients, and groups for it."""

import asyncio

from miles.engines.client import SGLangClient
from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate import Sampling
from miles.utils.types import Sample

END = 259  # <|end|> of the byte tokenizer


def make_group(size, tokens=(97, 98, 99), group_index=0):
    return [
        Sample(group_index=group_index, index=group_index * size + i, tokens=[*tokens, group_index])
        for i in range(size)
    ]


async def all_live():
    return {}


class Engines:
    """A pool of real clients for the servers at `urls`; `out` is what a look at the engines finds, and `silent` which
    stand still."""

    def __init__(self, config, tokenizer, *urls, limit=512, request_timeout=20.0):
        self.config = config
        self.clients = [SGLangClient(url, request_timeout=request_timeout) for url in urls]
        self.out, self.silent = {}, {}
        self.pool = EnginePool(config, self.clients, limit, tokenizer, self.check, standing_still=lambda: self.silent)

    async def check(self):
        return dict(self.out)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for client in self.clients:
            await client.close()

    async def complete(self, *groups, **changes):
        """Complete all groups, with changes of SGLang's parameters; returns the samples."""
        sampling = Sampling.for_rollout(self.config)
        parameters = [[sampling.parameters(sample) | changes for sample in group] for group in groups]
        await asyncio.gather(*map(self.pool.complete, groups, parameters))
        return [sample for group in groups for sample in group]
