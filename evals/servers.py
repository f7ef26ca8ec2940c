"""Starts one server process per variant, watches it, keeps its log, and leaves nothing running behind."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from evals.errors import ServerError, UsageError

_LISTENING = re.compile(r"listening on (https?://\S+)")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def free_port() -> int:
    """A TCP port that was free a moment ago; only for servers that cannot choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Launch:
    """How to start the server of one variant.

    Without `template` it is this project's service. A template is a command line in which `{model}`,
    `{variant}` and `{port}` are filled in; with `{port}` the server is expected there, without it it must
    print "listening on URL".
    """

    variant: str
    model: str
    log: Path
    template: str | None = None
    extra: Sequence[str] = field(default_factory=tuple)
    startup_timeout: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)  # on top of this process's
    ready: str = "/health"

    def command(self) -> tuple[list[str], str | None]:
        """The argument list, and the URL when it is known beforehand."""
        if self.template is None:
            return [
                sys.executable, "-m", "service", "--model", self.model, "--variant", self.variant,
                "--host", "127.0.0.1", "--port", "0", *self.extra,
            ], None
        port = free_port()
        try:
            parts = [
                part.format(model=self.model, variant=self.variant, port=port, python=sys.executable)
                for part in shlex.split(self.template)
            ]
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(f"--server-cmd: cannot fill in {error}; known: {{model}} {{variant}} {{port}}") from None
        return [*parts, *self.extra], f"http://127.0.0.1:{port}" if "{port}" in self.template else None


def _prepare_child() -> None:
    """Linux: the kernel ends the server when this process dies, even by SIGKILL. Elsewhere nothing happens."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Server:
    """A running server; a context manager that stops the whole process group on the way out."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._known_url: str | None = None

    def begin(self) -> None:
        """Start the process without waiting for it; entering the context then only waits."""
        command, self._known_url = self.launch.command()
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.launch.log.open("ab")
        self._start = self._log.tell()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_prepare_child,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(self.launch.env),
            )
        except OSError as error:
            self.stop()
            raise ServerError(f"cannot start '{command[0]}': {error.strerror}; check --server-cmd") from None

    def __enter__(self) -> Server:
        try:
            if self._process is None:
                self.begin()
            self._wait_until_ready(self._known_url)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id, None before the start."""
        return self._process.pid if self._process else None

    def _wait_until_ready(self, url: str | None) -> None:
        deadline = time.monotonic() + self.launch.startup_timeout
        pause = 0.05
        while time.monotonic() < deadline:
            reason = self.dead()
            if reason:
                raise ServerError(f"the server for '{self.launch.variant}' did not start: {reason}")
            found = _LISTENING.search(self.log_text())
            url = url or (found.group(1).rstrip("/") if found else None)
            if url and healthy(url, self.launch.ready):
                self.url = url
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        raise ServerError(
            f"the server for '{self.launch.variant}' was not ready after {self.launch.startup_timeout:g} s "
            f"(last log line: {self.last_line() or 'none'}); see {self.launch.log} or raise --startup-timeout"
        )

    def dead(self) -> str | None:
        """Why the process is gone (exit code or signal, last log line, log path), or None while it lives."""
        code = self._process.poll() if self._process else None
        if code is None:
            return None
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        line = self.last_line()
        return f"{line + ' ' if line else ''}({how}, log: {self.launch.log})"

    def log_text(self) -> str:
        """What this start has written so far (the last 64 KiB)."""
        with self.launch.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, size - 65536))
            return file.read().decode("utf-8", "replace")

    def last_line(self) -> str:
        """The last line of the log that says something, without an `error:` in front."""
        lines = [line.strip() for line in self.log_text().splitlines() if line.strip()]
        return re.sub(r"^(?:service: )?error:\s*", "", lines[-1], flags=re.IGNORECASE)[:400] if lines else ""

    def stop(self, patience: float = 10.0) -> None:
        """SIGTERM to the process group, SIGKILL after `patience` seconds; returns when all of it is gone."""
        process, self._process = self._process, None
        if process is not None:
            _signal_group(process.pid, signal.SIGTERM)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                pass
            _signal_group(process.pid, signal.SIGKILL)  # children that outlived their parent, too
            process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None


def _signal_group(pgid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pgid, number)
    except (ProcessLookupError, PermissionError):
        pass


def healthy(url: str, route: str = "/health") -> bool:
    """Does a server answer 200 on `route`, or on `/v1/models` where it has no such route?"""
    try:
        with httpx.Client(timeout=5.0, verify=False, trust_env=False) as http:
            answer = http.get(f"{url}{route}")
            if answer.status_code in (404, 405):
                answer = http.get(f"{url}/v1/models")
            return answer.status_code == 200
    except httpx.HTTPError:
        return False
