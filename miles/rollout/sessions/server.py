"""The endpoint that agents ask: OpenAI's chat completions, answered by the run's engines, with the token ids kept.

A session is one sample's agent. Its requests make one or several conversations: what extends one that was answered goes
on from the ids of that; anything else begins another.
"""

import asyncio
import copy
import json
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from miles.config import RunConfig
from miles.rollout.engine_pool import EnginePool, EnginesLost, RequestFailed
from miles.rollout.sessions.chat_format import ChatFormat, Message, NotAnExtension
from miles.rollout.sessions.chat_protocol import (
    BadRequest,
    ChatRequest,
    completion_body,
    error_body,
    models_body,
    read_request,
    reply_message,
)
from miles.rollout.sessions.tool_calls import CallParser, ParsedTurn
from miles.utils.errors import UserError
from miles.utils.network import host_port
from miles.utils.tasks import cancelled
from miles.utils.types import Sample

# Conversations are long; aiohttp's own limit is 1 MiB.
MAX_REQUEST_BYTES = 64 * 2**20


class SessionStopped(Exception):
    """Nothing more is answered in this session: its sample will be generated anew."""


@dataclass
class Piece:
    """One conversation: its tokens, and the messages that they are, the model's last one too."""

    sample: Sample
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    seed: int
    turns: int = 0
    busy: bool = False


class Session:
    """What one agent asks for, and gets.

    Args:
        config: the run's configuration.
        pool: the engines.
        chat: how messages become tokens.
        parser: finds calls of tools; None: tools are refused.
        sample: the prompt; it is not changed.
        sampling_params: SGLang's, of the sample: `max_new_tokens` bounds what the model writes in all pieces together;
            of requests at the same time each may write what is left when it begins.

    Attributes:
        pieces: the conversations, in the order of their first answers.
        stopped: set once it is cut off, by new weights without --partial-rollout or by whoever opened it.
        exhausted: a request was refused because a limit of the run is reached.
        error: of the engines, which the agent saw as a status of 502; None: none.
    """

    def __init__(
        self,
        config: RunConfig,
        pool: EnginePool,
        chat: ChatFormat,
        parser: CallParser | None,
        sample: Sample,
        sampling_params: dict[str, Any],
    ) -> None:
        self._config = config
        self._pool = pool
        self._chat = chat
        self._parser = parser
        self._prompt = sample
        self._sampling = sampling_params
        self._requests: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._begun = 0
        self.pieces: list[Piece] = []
        self.stopped = asyncio.Event()
        self.exhausted = False
        self.error: Exception | None = None

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        """The answer to a request, for JSON.

        While the pool is held it waits, and goes on with what it has, if --partial-rollout allows that.

        Raises:
            BadRequest: the request can't be answered, or a limit is reached.
            SessionStopped: the session has been stopped, or is now.
            RequestFailed, EnginesLost: kept as `error` too.
        """
        if self.stopped.is_set() or self._closed:
            raise SessionStopped
        if request.calls:
            if self._parser is None:
                raise BadRequest("tools can't be used: the run has no --generate-tool-call-parser")
            try:
                self._parser.check(request.tools or ())
            except UserError as error:
                raise BadRequest(f"tools: {error}") from error
        piece, draft = self._draft(request)
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._requests.add(task)
        if piece is not None:
            piece.busy = True
        try:
            return await self._answer(request, piece, draft)
        except (RequestFailed, EnginesLost) as error:
            self.error = error
            raise
        finally:
            self._requests.discard(task)
            if piece is not None:
                piece.busy = False

    async def close(self) -> None:
        """End what is still being answered."""
        self._closed = True
        await cancelled(*self._requests)

    def _draft(self, request: ChatRequest) -> tuple[Piece | None, Sample]:
        """The piece that the request extends, and the sample to complete: a copy, kept only if that succeeds."""
        piece = self._extended_by(request)
        if piece is not None:
            new = request.messages[len(piece.messages) :]
            try:
                context = self._chat.follow(piece.sample.tokens[-1], new, request.tools)
            except NotAnExtension:
                pass  # the template would write the conversation anew, and so does another piece
            except UserError as error:
                raise BadRequest(str(error)) from error
            else:
                draft = copy.copy(piece.sample)  # what is added makes new lists
                draft.append_context(context)
                return piece, draft
        draft = copy.deepcopy(self._prompt)
        try:
            draft.tokens = self._chat.start(request.messages, request.tools)
        except UserError as error:
            raise BadRequest(str(error)) from error
        return None, draft

    def _extended_by(self, request: ChatRequest) -> Piece | None:
        """The longest conversation that the request goes on with, by messages of others than the model."""
        longest = None
        for piece in self.pieces:
            length = len(piece.messages)
            old, new = request.messages[:length], request.messages[length:]
            extends = new and old == piece.messages and all(message["role"] != "assistant" for message in new)
            if extends and not piece.busy and request.tools == piece.tools:
                if longest is None or length > len(longest.messages):
                    longest = piece
        return longest

    async def _answer(self, request: ChatRequest, piece: Piece | None, draft: Sample) -> dict[str, Any]:
        prompt_tokens = len(draft.tokens)
        room = self._room(piece, prompt_tokens)
        if request.max_tokens is not None:
            room = min(room, request.max_tokens)
        stop_texts = [*(self._sampling.get("stop") or ()), *request.stop]
        parameters = {**self._sampling, "stop": stop_texts or None, "sampling_seed": self._seed(piece)}
        while True:
            left = room - (len(draft.tokens) - prompt_tokens)
            await self._pool.complete([draft], [{**parameters, "max_new_tokens": left}])
            if draft.status is not Sample.Status.ABORTED:
                break
            if not self._config.partial_rollout:
                self._stop()
            await self._pool.wait_released()
        versions = {version for part in (draft, *self._samples()) for version in part.weight_versions}
        if self.stopped.is_set() or (len(versions) > 1 and not self._config.partial_rollout):
            self._stop()

        written = draft.tokens[prompt_tokens:]
        text = self._chat.text(written, parameters.get("stop_token_ids") or ())
        truncated = draft.status is Sample.Status.TRUNCATED
        turn = None
        if self._parser is not None and request.calls and not truncated:
            turn = self._parser.parse(text, request.tools or ())
        if turn is None or not turn.calls:
            cut = min((place for place in map(text.find, stop_texts) if place >= 0), default=None)
            turn = ParsedTurn(text[:cut], [])
        message = reply_message(turn)
        if piece is None:
            piece = Piece(draft, [], request.tools, parameters["sampling_seed"])
            self.pieces.append(piece)
        piece.sample, piece.messages = draft, [*request.messages, message]
        piece.turns += 1
        return completion_body(message, truncated=truncated, prompt_tokens=prompt_tokens, new_tokens=len(written))

    def _seed(self, piece: Piece | None) -> int:
        """Each conversation has its own: the same question, asked again, may get another answer."""
        if piece is not None:
            return piece.seed
        self._begun += 1
        return (self._sampling["sampling_seed"] + self._begun - 1) % 2**63

    def _room(self, piece: Piece | None, prompt_tokens: int) -> int:
        """Tokens that the model may write now; BadRequest if there is none, or it has written often enough."""
        config = self._config
        written = sum(sample.trained_length for sample in self._samples())
        left = self._sampling["max_new_tokens"] - written
        assert config.rollout_max_context_len is not None, "a rule asks for it"
        context = config.rollout_max_context_len - prompt_tokens
        if piece is not None and piece.turns >= config.generate_max_turns:
            limit = f"the model has answered {piece.turns} times in this conversation (--generate-max-turns)"
        elif left < 1:
            limit = f"the model has written {written} tokens, all that it may (--rollout-max-response-len)"
        elif context < 1:
            limit = (
                f"the conversation has {prompt_tokens} tokens and leaves no room for an answer "
                f"(--rollout-max-context-len {config.rollout_max_context_len})"
            )
        else:
            return min(left, context)
        self.exhausted = True
        if piece is not None:
            piece.sample.status = Sample.Status.TRUNCATED
        raise BadRequest(limit, "context_length_exceeded")

    def _samples(self) -> list[Sample]:
        return [piece.sample for piece in self.pieces]

    def _stop(self) -> None:
        self.stopped.set()
        raise SessionStopped


class SessionServer:
    """Serves sessions at an address of this process, each under a name that can't be guessed."""

    def __init__(self, config: RunConfig, pool: EnginePool) -> None:
        self._config = config
        self._pool = pool
        name = config.generate_tool_call_parser
        self._parser = None if name is None else CallParser(name, pool.tokenizer)
        self._chat = ChatFormat.from_config(config, pool.tokenizer, pool.end_ids)
        self._sessions: dict[str, Session] = {}
        self._url = ""
        application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        application.router.add_post("/sessions/{id}/v1/chat/completions", self._completions)
        application.router.add_get("/sessions/{id}/v1/models", self._models)
        # No access log: the name of a session opens it. An agent that gave up needs no answer.
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)

    async def start(self) -> None:
        """Listen.

        Raises:
            ValueError: the address can't be listened on.
        """
        host, port = self._config.session_server_ip, self._config.session_server_port
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host.strip("[]"), port or 0).start()
        except OSError as error:
            await self._runner.cleanup()
            raise _no_address(self._config, error) from error
        self._url = f"http://{host_port(host, self._runner.addresses[0][1])}"

    async def close(self) -> None:
        """End all sessions, and listen no more."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        await self._runner.cleanup()

    @asynccontextmanager
    async def session(
        self, config: RunConfig, sample: Sample, sampling_params: dict[str, Any]
    ) -> AsyncIterator[tuple[Session, str]]:
        """A session, open as long as the context is, and its base URL for OpenAI's clients.

        Its limits are those of `config`: an evaluation may have others than the rollouts.
        """
        session = Session(config, self._pool, self._chat, self._parser, sample, sampling_params)
        name = secrets.token_urlsafe(32)
        self._sessions[name] = session
        try:
            yield session, f"{self._url}/sessions/{name}/v1"
        finally:
            del self._sessions[name]
            await session.close()

    async def _completions(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["id"])
        if session is None:
            return _error(404, "there is no such session, or its agent has ended", "invalid_request_error", "not_found")
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return _error(400, f"the body is no JSON: {error}", "invalid_request_error", "invalid_request")
        try:
            return web.json_response(await session.complete(read_request(body)))
        except BadRequest as error:
            return _error(400, str(error), "invalid_request_error", error.code)
        except SessionStopped:
            return _error(503, "the rollout goes on without this agent", "server_error", "session_stopped")
        except (RequestFailed, EnginesLost) as error:
            return _error(502, str(error), "server_error", "engine_error")

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self._sessions:
            return _error(404, "there is no such session, or its agent has ended", "invalid_request_error", "not_found")
        return web.json_response(models_body())


def _error(status: int, message: str, kind: str, code: str) -> web.Response:
    # OpenAI's client repeats 5xx by itself otherwise; here that helps nobody.
    return web.json_response(error_body(message, kind, code), status=status, headers={"x-should-retry": "false"})


def check_address(config: RunConfig) -> None:
    """Raise ValueError where the endpoint can't listen at the address that `config` gives it."""
    host = config.session_server_ip.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, config.session_server_port or 0), family=family).close()
    except OSError as error:
        raise _no_address(config, error) from error


def _no_address(config: RunConfig, error: OSError) -> UserError:
    ip, port = config.session_server_ip, config.session_server_port
    return UserError(f"--session-server-ip {ip}, --session-server-port {port}: {error}")


_SERVER = "session server"  # in what is shared of a pool


async def server_of(config: RunConfig, pool: EnginePool) -> SessionServer:
    """The server for agents of this pool; the first call starts it."""
    if _SERVER not in pool.shared:
        pool.shared[_SERVER] = asyncio.create_task(_started(config, pool))
    return await asyncio.shield(pool.shared[_SERVER])


async def close_server(pool: EnginePool) -> None:
    """End the server of this pool, if `server_of` started one."""
    starting: asyncio.Task[SessionServer] | None = pool.shared.pop(_SERVER, None)
    if starting is not None:
        [server] = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(server, SessionServer):
            await server.close()


async def _started(config: RunConfig, pool: EnginePool) -> SessionServer:
    server = SessionServer(config, pool)
    await server.start()
    return server
