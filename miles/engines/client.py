"""HTTP client of one SGLang server."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from miles.utils.array_list import ArrayList

BODY_CHARS_IN_ERROR = 500
BACKOFF_SECONDS = 0.5
# For what the server's scheduler carries out, between two steps of the model: pause, flush, release, resume, a bucket.
CONTROL_TIMEOUT_SECONDS = 300.0
# For what its HTTP process answers by itself.
QUICK_TIMEOUT_SECONDS = 60.0
# Of `require_reachable`: how often it tries, and how long it waits for an answer.
CONNECT_ATTEMPTS = 3
CONNECT_SECONDS = 2.0
# SGLang closes a connection that has been idle for 5 seconds: a request must not meet the end of it.
KEEP_ALIVE_SECONDS = 2.0
JSON_HEADERS = {"Content-Type": "application/json"}


class SGLangError(RuntimeError):
    """A request that failed for good. `status` is the HTTP status, or None where no whole answer came."""

    def __init__(self, url: str, status: int | None, body: str, attempts: int) -> None:
        self.url, self.status, self.body, self.attempts = url, status, body[:BODY_CHARS_IN_ERROR], attempts
        answer = "no answer" if status is None else f"HTTP {status}"
        super().__init__(f"{url}: {answer} after {attempts} attempt{'s' * (attempts > 1)}: {self.body}")

    @property
    def refused(self) -> bool:
        """The request itself is wrong: sending it again is of no use."""
        return self.status is not None and 400 <= self.status < 500

    def __reduce__(self) -> tuple:
        """How Ray carries it to the driver: an exception is rebuilt from its message otherwise."""
        return SGLangError, (self.url, self.status, self.body, self.attempts)


class SGLangClient:
    """Talks to the server at `url` (`http://host:port`), without proxies and without a limit of connections.

    Use it as `async with SGLangClient(url) as client`, or call `close()`. Its session belongs to the event loop it was
    first used in; after `close()` the client can be used in another loop.

    Args:
        request_timeout: seconds that one generate request may take, over which it fails without a retry.
        load_timeout: seconds for what reads all weights: loading a checkpoint, checksums, random weights. Less than
            --distributed-timeout-minutes, which the trainer's other ranks wait meanwhile.
        retries: further attempts of a `score` request after a lost connection or a 5xx answer, 0.5, 1, 2, ... seconds
            apart. All else is sent once: `EnginePool` sends what generates to another engine, and repeating a control
            call that half happened is the caller's decision.
    """

    def __init__(
        self,
        url: str,
        *,
        request_timeout: float = 1800.0,
        load_timeout: float = CONTROL_TIMEOUT_SECONDS,
        retries: int = 3,
    ) -> None:
        self.url = url
        self._request_timeout = request_timeout
        self._load_timeout = load_timeout
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Generation

    async def generate(
        self, input_ids: Sequence[Sequence[int]], sampling_params: list[dict[str, object]]
    ) -> Sequence["dict | SGLangError"]:
        """Continue each prompt of `input_ids`; one answer a prompt, in order: {text, output_ids, meta_info}.

        `meta_info.output_token_logprobs` holds [log-prob, id, None] for each new token, at the sampling temperature.
        """
        assert len(input_ids) == len(sampling_params)
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        return await self._generate(body, retries=0)

    async def score(self, input_ids: Sequence[Sequence[int]], start: list[int]) -> list[dict]:
        """Look at each sequence of `input_ids` from token `start` on, and generate nothing; answers as `generate`'s.

        `meta_info.input_token_logprobs` holds [log-prob, id, None] for each token from there on, with None for the
        first one's log-prob. The temperature is 1: SGLang knows no other for tokens that it did not draw. The
        vocabulary's last id comes back as 0.
        """
        assert len(input_ids) == len(start)
        sampling_params = {"max_new_tokens": 0}
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        return await self._generate(body | {"logprob_start_len": start}, retries=self._retries)

    async def _generate(self, body: dict, retries: int) -> list[dict]:
        timeout, flag = self._request_timeout, "--rollout-request-timeout"
        replies = await self._call("POST", "/generate", body, timeout=timeout, retries=retries, flag=flag)
        asked = len(body["input_ids"])
        if not isinstance(replies, list) or len(replies) != asked:
            got = f"{len(replies)} samples" if isinstance(replies, list) else repr(replies)
            raise SGLangError(self.url + "/generate", 200, f"asked for {asked} samples, got {got}", 1)
        return replies

    async def detokenize(self, ids: list[list[int]]) -> list[str]:
        """The text of each list of ids, special tokens too, by the server's tokenizer."""
        body = {"tokens": ids, "skip_special_tokens": False}
        texts = (await self._control("/detokenize", body, timeout=QUICK_TIMEOUT_SECONDS))["text"]
        if len(texts) != len(ids):
            raise SGLangError(self.url + "/detokenize", 200, f"asked for {len(ids)} texts, got {len(texts)}", 1)
        return texts

    async def abort(self, request_id: str | None = None) -> None:
        """Abort the request `request_id`; all requests where it is None."""
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        await self._control("/abort_request", body, timeout=QUICK_TIMEOUT_SECONDS)

    # State

    async def health(self) -> None:
        """Raise unless the server is up."""
        await self._get("/health")

    async def require_reachable(self) -> None:
        """Raise SGLangError if nothing takes a connection, several times in a row.

        Any answer will do, and one that is late is not missing: a server under load may have others to give first.
        """
        for attempt in range(1, CONNECT_ATTEMPTS + 1):
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self.model_info()
                return
            except TimeoutError:
                return
            except SGLangError as error:
                if error.status is not None:
                    return
                if attempt == CONNECT_ATTEMPTS:
                    raise
            await asyncio.sleep(BACKOFF_SECONDS)

    async def model_info(self) -> dict:
        """The server's model; `weight_version` is the version of its weights."""
        return await self._get("/model_info")

    async def server_info(self) -> dict:
        """The server's arguments and `internal_states`, one a data-parallel rank, which its scheduler gives.

        It touches no memory of a GPU: it can be asked for at any time, also while memory is away.
        """
        return await self._get("/server_info", timeout=CONTROL_TIMEOUT_SECONDS)

    async def running_requests(self) -> int:
        """How many requests run or wait, as the scheduler last wrote down: what has just ended may still count."""
        reply = await self._get("/v1/loads?include=core")
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in reply["loads"])

    async def flush_cache(self, timeout: float = 60.0) -> None:
        """Drop the prefix cache, waiting up to `timeout` seconds for running requests; not after `pause("retract")`."""
        await self._control(f"/flush_cache?timeout={timeout:g}", None)

    async def pause(self, mode: str) -> None:
        """Stop generating: `abort` ends the running requests, `retract` queues them again, `in_place` freezes them."""
        await self._control("/pause_generation", {"mode": mode})

    async def continue_(self) -> None:
        """Go on after `pause`. Waits for a pause that is not through: one of a server that hangs never is."""
        await self._control("/continue_generation", {}, timeout=QUICK_TIMEOUT_SECONDS)

    # Memory

    async def release_memory_occupation(self, tags: Sequence[str]) -> None:
        """Give the memory of `tags` (kv_cache, weights, cuda_graph) back; its contents are lost.

        Every tag must be there and no request may run: the server dies otherwise. See `EngineMemory`.
        """
        await self._control("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory_occupation(self, tags: Sequence[str]) -> None:
        """Take the memory of `tags` again. Every tag must have been released: the server dies otherwise."""
        await self._control("/resume_memory_occupation", {"tags": list(tags)})

    # Weights

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        """Load tensors into the server's model.

        Args:
            serialized_named_tensors: base64 of SGLang's `MultiprocessingSerializer`, one string a TP rank.
            load_format: None, or `flattened_bucket` for one flat tensor and its table of contents.
            flush_cache: drop the prefix cache afterwards; must be False while paused by `retract` (the server dies).
            weight_version: reported in `meta_info` from now on.

        Names and shapes must be right: SGLang answers success for an unknown name and dies of a wrong shape.
        """
        body = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        reply = await self._control("/update_weights_from_tensor", body)
        self._require_success("/update_weights_from_tensor", reply)

    async def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Have the server's TP ranks join a process group as ranks `rank_offset`, `rank_offset` + 1, ...

        Rank 0 is the sender and serves the TCP store at `master_address:master_port`. Answers once all have joined.
        """
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        reply = await self._control("/init_weights_update_group", body)
        self._require_success("/init_weights_update_group", reply)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the process group."""
        reply = await self._control("/destroy_weights_update_group", {"group_name": group_name})
        self._require_success("/destroy_weights_update_group", reply)

    async def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, group_name: str
    ) -> None:
        """Load one flat bucket that rank 0 of `group_name` broadcasts: the tensors' bytes one after the other.

        Args:
            dtypes: names in torch, such as "bfloat16".

        Names and shapes must be right, as for tensors. The prefix cache is not touched.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        reply = await self._control("/update_weights_from_distributed", body)
        self._require_success("/update_weights_from_distributed", reply)

    async def update_weights_from_disk(self, folder: str) -> None:
        """Load the safetensors checkpoint in `folder`, a path on the server's machine. The prefix cache is kept."""
        body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
        reply = await self._load("/update_weights_from_disk", body)
        self._require_success("/update_weights_from_disk", reply)

    async def weight_checksums(self) -> list[dict[str, str]]:
        """For each TP rank a hash of every tensor of its model, by SGLang's name for it."""
        reply = await self._load("/weights_checker", {"action": "checksum"})
        self._require_success("/weights_checker", reply)
        return [rank["checksums"] for rank in reply["ranks"]]

    async def reset_weights(self) -> None:
        """Overwrite every tensor of the model with random numbers."""
        reply = await self._load("/weights_checker", {"action": "reset_tensors"})
        self._require_success("/weights_checker", reply)

    async def update_weight_version(self, version: str) -> None:
        """Set the version that is reported with each sample. Running requests go on."""
        body = {"new_version": version, "abort_all_requests": False}
        reply = await self._control("/update_weight_version", body, timeout=QUICK_TIMEOUT_SECONDS)
        self._require_success("/update_weight_version", reply)

    # Transport

    def _require_success(self, path: str, reply: Any) -> None:
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise SGLangError(self.url + path, 200, repr(reply), 1)

    async def _control(self, path: str, body: dict | None, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> Any:
        return await self._call("POST", path, body, timeout=timeout, retries=0)

    async def _load(self, path: str, body: dict) -> Any:
        flag = "bounded by --distributed-timeout-minutes"
        return await self._call("POST", path, body, timeout=self._load_timeout, retries=0, flag=flag)

    async def _get(self, path: str, *, timeout: float = QUICK_TIMEOUT_SECONDS) -> Any:
        return await self._call("GET", path, None, timeout=timeout, retries=0)

    async def _call(
        self, method: str, path: str, body: dict | None, *, timeout: float, retries: int, flag: str = "timeout"
    ) -> Any:
        """The decoded answer: JSON where the server says so, else text. Anything but 2xx raises `SGLangError`."""
        url = self.url + path
        content, headers = (
            (None, None) if body is None else (orjson.dumps(body, default=ArrayList.tolist), JSON_HEADERS)
        )
        for attempt in range(1, retries + 2):
            try:
                async with self._open_session().request(
                    method, url, data=content, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout)
                ) as response:
                    answer = await response.read()
                    if response.ok and response.content_type == "application/json":
                        return orjson.loads(answer)
                    text = answer.decode(errors="replace")
                    if response.ok:
                        return text
                    failure = SGLangError(url, response.status, text, attempt)
                    if failure.refused:
                        raise failure
            except TimeoutError as error:
                raise SGLangError(url, None, f"nothing within {timeout:g} s ({flag})", attempt) from error
            except (aiohttp.ClientError, ConnectionError, orjson.JSONDecodeError) as error:
                failure = SGLangError(url, None, f"{type(error).__name__}: {error}", attempt)
            if attempt <= retries:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
        raise failure

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # limit=0 lifts aiohttp's cap of 100 connections.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
            self._loop = asyncio.get_running_loop()
        assert self._loop is asyncio.get_running_loop(), "the session belongs to another event loop: close() it there"
        return self._session
