"""The Ray actor that holds one SGLang server."""

from collections.abc import Sequence
from pathlib import Path

from miles.backends.sglang_utils.arguments import (
    HOST,
    PORTS_OF_A_SERVER,
    command_line,
    server_arguments,
    server_environment,
)
from miles.backends.sglang_utils.server_process import ServerProcess
from miles.config import RunConfig
from miles.utils.network import PORTS, free_port_block, host_port


class SGLangEngine:
    """Starts, watches and ends one server. The actor itself needs next to no CPU or memory: it imports no torch.

    Args:
        config: the run's configuration.
        engine_rank: number of this engine, from 0; names its log `<run_dir>/logs/engine_<rank>.log`.
        gpu_ids: physical ids of the GPUs of the server; empty on a CPU.
        host: address of this node on which the server listens.
        ports: where to look for free ports. A server opens its own only seconds after the search: engines of one node
            that start together need ports of their own.
    """

    def __init__(
        self,
        config: RunConfig,
        engine_rank: int,
        gpu_ids: list[int],
        host: str = HOST,
        ports: Sequence[int] = PORTS,
    ) -> None:
        self._config = config
        self._rank = engine_rank
        self._gpu_ids = gpu_ids
        self._host = host
        self._ports = ports
        self._server: ServerProcess | None = None

    def start(self) -> str:
        """Start the server, wait until it is healthy and return its URL. A failed start leaves no process behind."""
        assert self._server is None, f"engine {self._rank} was started before"
        port = free_port_block(PORTS_OF_A_SERVER, self._ports, self._host)
        url = "http://" + host_port(self._host, port)
        assert self._config.run_dir is not None, "it is derived where it is not given"
        self._server = ServerProcess(
            command_line(server_arguments(self._config, engine_rank=self._rank, host=self._host, port=port)),
            server_environment(self._config, engine_rank=self._rank, gpu_ids=self._gpu_ids, port=port),
            Path(self._config.run_dir) / "logs" / f"engine_{self._rank}.log",
            url + "/health",
        )
        try:
            self._server.start()
            self._server.wait_healthy(self._config.rollout_engine_start_timeout)
        except BaseException:
            self.shutdown()
            raise
        return url

    def check(self) -> None:
        """Raise `ServerDied`, with the tail of the log, if the server isn't running."""
        assert self._server is not None, f"engine {self._rank} was not started"
        self._server.check()

    def shutdown(self) -> None:
        """End the server and all its processes; a second call does nothing."""
        if self._server is not None:
            self._server.terminate()
