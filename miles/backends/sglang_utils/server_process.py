"""One server process: its log file, a bounded wait for health, and its end together with everything it started."""

import contextlib
import http.client
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from miles.backends.sglang_utils import supervisor
from miles.backends.sglang_utils.supervisor import group_members
from miles.config.secrets import MASK, is_secret
from miles.utils.errors import UserError

LOG_TAIL_LINES = 30
POLL_SECONDS = 0.2


class ServerDied(RuntimeError):
    """The server isn't running (any more); the message holds the tail of its log."""


class ServerProcess:
    """A server in a session (and process group) of its own, which ends with the thread that started it.

    Args:
        command: program and arguments; the program as an absolute path.
        environment: the whole environment of the server.
        log_path: file for its stdout and stderr, overwritten; the first line is the command, without its secrets.
        health_url: answers 200 once the server can work.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log_path: Path, health_url: str) -> None:
        self.command = command
        self.environment = environment
        self.log_path = log_path
        self.health_url = health_url
        self._process: subprocess.Popen | None = None

    @property
    def pid(self) -> int:
        """Id of the process group that the server and all it starts live in."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self) -> None:
        """Start the process; returns at once."""
        assert self._process is None, "the server was started before"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("w") as log:
            log.write(shlex.join(_without_secrets(self.command)) + "\n")
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, supervisor.__file__, str(os.getpid()), *self.command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise `ServerDied` if the process has ended."""
        if self._process is None:
            raise ServerDied(f"the server of {self.log_path} was not started")
        code = self._process.poll()
        if code is not None:
            raise ServerDied(f"the server (pid {self.pid}) {_how_it_ended(code)}.\n{self._log_report()}")

    def wait_healthy(self, timeout: float) -> None:
        """Wait until the server answers on its health URL.

        Raises:
            ServerDied: it ended instead.
            UserError: no answer within `timeout` seconds. The process is left running: call `terminate`.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check()
            if self._answers():
                return
            time.sleep(POLL_SECONDS)
        raise UserError(
            f"the server (pid {self.pid}) was not healthy within {timeout:g} s: see why below, or give it longer "
            "(--rollout-engine-start-timeout).\n"
            f"{self._log_report()}"
        )

    def terminate(self) -> None:
        """End the process and all it started; does nothing if none is left.

        Raises:
            RuntimeError: a process survived SIGKILL for 10 seconds.
        """
        if self._process is None:
            return
        self._process.terminate()  # its guard then ends the group in order
        if self._gone_within(5.0):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self._gone_within(10.0):
            raise RuntimeError(f"processes {group_members(self.pid)} of the server (pid {self.pid}) survived SIGKILL")

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while group_members(self.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        assert self._process is not None
        self._process.wait()  # reaps it
        return True

    def _answers(self) -> bool:
        parts = urlsplit(self.health_url)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
        try:
            connection.request("GET", parts.path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _log_report(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"Last lines of {self.log_path}:\n" + "\n".join(f"  {line}" for line in lines)


def _without_secrets(command: list[str]) -> list[str]:
    hidden = [flag.startswith("--") and is_secret(flag) for flag in command]
    return [MASK if secret else word for secret, word in zip([False, *hidden[:-1]], command, strict=True)]


def _how_it_ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
