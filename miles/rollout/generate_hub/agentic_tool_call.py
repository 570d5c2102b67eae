"""Agents: programs that ask the model over HTTP as they ask any other, while every token is kept to train on.

Chosen by `--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate`.
"""

import asyncio
import copy
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from miles.config import RunConfig
from miles.rollout import engine_pool
from miles.rollout.answers import end_token_ids
from miles.rollout.engine_pool import EnginePool, EnginesLost
from miles.rollout.sessions.chat_format import ChatFormat
from miles.rollout.sessions.chat_protocol import MODEL
from miles.rollout.sessions.server import Session, check_address, server_of
from miles.rollout.sessions.tool_calls import CallParser
from miles.utils.dotted_path import load_function
from miles.utils.errors import UserError
from miles.utils.json_values import as_json, shown
from miles.utils.tasks import cancelled
from miles.utils.types import Sample

logger = logging.getLogger(__name__)

FLAG = "--custom-agent-function-path"

Agent = Callable[[str, Any, dict[str, Any], dict[str, Any]], Coroutine[Any, Any, dict[str, Any] | None]]


def check(config: RunConfig, tokenizer: Any) -> None:
    """Raise ValueError where `generate` can't be used: agent, parser, chat template or address are unusable."""
    _load_agent(config)
    if config.generate_tool_call_parser is not None:
        CallParser(config.generate_tool_call_parser, tokenizer)
    ChatFormat.from_config(config, tokenizer, end_token_ids(config.hf_checkpoint, tokenizer))
    check_address(config)


async def generate(config: RunConfig, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Run the agent on the sample's prompt; the samples of the conversations that it had with the model.

    There is one sample a conversation, in the order of their first answers. What the agent returns goes into the
    metadata of each. Where it met a limit of the run, the conversation concerned is TRUNCATED, even if the agent failed
    of it. Where the rollout ended first, or new weights came and --partial-rollout is not given, the result is the
    sample, ABORTED, with nothing but its prompt: called again, the agent starts anew.

    Args:
        sampling_params: of all the agent's requests. `max_new_tokens` bounds what the model writes in all of them.

    Raises:
        ValueError: the agent returned something that does not go into metadata.
        RuntimeError: it asked the model for nothing.
        Exception: whatever it raised.
    """
    pool, should_stop = engine_pool.current(), engine_pool.stopping()
    agent = _load_agent(config)
    server = await server_of(config, pool)
    sample.reset_for_retry()
    async with server.session(config, sample, sampling_params) as (session, base_url):
        request_kwargs = {"model": MODEL, "temperature": sampling_params["temperature"]}
        metadata = copy.deepcopy(sample.metadata)
        prompt = metadata.pop("messages", sample.prompt)
        work = asyncio.create_task(agent(base_url, prompt, request_kwargs, metadata))
        stop = asyncio.create_task(session.stopped.wait())
        end = asyncio.create_task(_end_of_rollout(pool, should_stop))
        try:
            await asyncio.wait({work, stop, end}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                session.stopped.set()
        finally:
            await cancelled(work, stop, end)
    if isinstance(session.error, EnginesLost):
        raise session.error
    if session.stopped.is_set():
        sample.status = Sample.Status.ABORTED
        return [sample]
    return _samples(sample, session, work)


def _load_agent(config: RunConfig) -> Agent:
    path = config.custom_agent_function_path
    if path is None:
        raise UserError(f"{FLAG} is not given: there is no agent to run")
    return load_function(FLAG, path, "base_url", "prompt", "request_kwargs", "metadata", is_async=None)


async def _end_of_rollout(pool: EnginePool, should_stop: Callable[[], bool]) -> None:
    """Return when the rollout ends: an agent that is at work in its own tools then is not waited for."""
    while True:
        await pool.wait_held()
        if should_stop():
            return
        await pool.wait_released()


def _samples(sample: Sample, session: Session, work: asyncio.Task[dict[str, Any] | None]) -> list[Sample]:
    error = work.exception()
    if error is not None and not (session.exhausted and session.pieces):
        if session.error is not None:
            raise session.error from error  # what the engines said tells more than what the agent made of it
        raise error
    if error is not None:
        logger.info("sample %s: its agent met a limit of the run and ended with %r", sample.index, error)
    returned = {} if error is not None else _metadata(work.result())
    if not session.pieces:
        raise RuntimeError(f"sample {sample.index}: its agent got no answer of the model: there is nothing to train on")
    samples = [piece.sample for piece in session.pieces]
    for piece in samples:
        piece.metadata |= copy.deepcopy(returned)
    return samples


def _metadata(returned: Any) -> dict[str, Any]:
    if returned is None:
        return {}
    if not isinstance(returned, dict):
        raise UserError(f"{FLAG} returned {shown(returned)}; it must return a dict that JSON can hold, or None")
    return as_json(returned, f"what {FLAG} returned")
