"""Runs the application under uvicorn: timeouts against stuck clients, graceful drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import StartupError

REQUEST_TIMEOUT = 60.0  # how long a client may send nothing of a request it owes
SLOWEST_REQUEST = 10  # times that: how long a request may take to arrive, however steadily it trickles
KEEP_ALIVE = 75  # longer than clients keep an idle connection (aiohttp 15 s), else a reused one may just have closed
WRITE_TIMEOUT = 60.0  # how long a client may read nothing while data waits for it


def protocol_class(
    request_timeout: float = REQUEST_TIMEOUT, write_timeout: float = WRITE_TIMEOUT
) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol with two timers it lacks, so that half-open and stalled connections end.

    A connection that owes us (the rest of) a request and sends nothing for `request_timeout` seconds is aborted, and
    so is one that takes nothing of its answer for `write_timeout` seconds, which the route sees as a disconnect. Time
    in which we do not read, because the earlier part of the body is not consumed yet, is not held against the client.
    """

    class GuardedProtocol(HttpToolsProtocol):
        _request_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _last_data = 0.0
        _deadline = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_request()

        def connection_lost(self, exc: Exception | None) -> None:
            _stop(self._request_timer)
            _stop(self._write_timer)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._last_data = self.loop.time()
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._request_timer is None:
                self._expect_request()

        def on_message_complete(self) -> None:
            _stop(self._request_timer)
            self._request_timer = None
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._write_timer is None:
                self._write_timer = self.loop.call_later(write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            _stop(self._write_timer)
            self._write_timer = None
            super().resume_writing()

        def _expect_request(self) -> None:
            self._last_data = self.loop.time()
            self._deadline = self._last_data + SLOWEST_REQUEST * request_timeout
            self._request_timer = self.loop.call_later(request_timeout, self._check_request)

        def _check_request(self) -> None:
            now = self.loop.time()
            if self.flow.read_paused:
                self._last_data = now
            left = min(self._last_data + request_timeout, self._deadline) - now
            if left <= 0:
                self.transport.abort()
            else:
                self._request_timer = self.loop.call_later(left, self._check_request)

    return GuardedProtocol


def _stop(timer: asyncio.TimerHandle | None) -> None:
    """Cancel a timer if it runs."""
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """uvicorn without its habit of re-raising the signal after a graceful shutdown, so that the exit code is ours.

    The first SIGTERM or SIGINT calls `on_signal` and drains; a second one ends at once.
    """

    on_signal: Callable[[], None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM on the running loop (only in the main thread)."""
        try:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._signal)
        except (ValueError, RuntimeError):  # not the main thread: somebody else handles signals
            yield
            return
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _signal(self) -> None:
        if self.should_exit:
            self.force_exit = True
        elif self.on_signal is not None:
            self.on_signal()
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or StartupError naming the port: checked before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise StartupError(
            f"cannot listen on {host} port {port}: {reason}; choose another --port (0 picks a free one)"
        ) from None
    sock.setblocking(False)
    return sock


def config(app: Any, drain_seconds: float) -> uvicorn.Config:
    """uvicorn's settings: our protocol, no logging of its own, a few seconds beyond the drain to send last bytes."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=protocol_class(),
        lifespan="on",
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds) + 5),
    )
