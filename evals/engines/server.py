"""Starts a variant file's server (or reaches the one it names), and asks it which kernel it runs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals import run_preflight as preflight
from evals.client import Endpoint
from evals.engines import attest
from evals.engines.command import Plan, plan
from evals.engines.load import EngineVariant
from evals.errors import AttestationError, ServerError
from evals.servers import Launch, Server, free_port

TAIL = 20  # lines of a crashed server's log that are shown
_LOG_LIMIT = 32 << 20


@dataclass(frozen=True)
class EngineLaunch(Launch):
    """A `Launch` whose command line comes from a plan."""

    plan: Plan = field(default_factory=lambda: Plan((), {}, ""))

    def command(self) -> tuple[list[str], str | None]:
        return list(self.plan.command), self.plan.url


class EngineServer(Server):
    """A server that may live in a container: stopping the client is not enough when it was killed."""

    def stop(self, patience: float = 60.0) -> None:
        container = self.launch.plan.container if isinstance(self.launch, EngineLaunch) else None
        started = self.pid is not None
        super().stop(patience)
        if container and started:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["docker", "rm", "--force", container], capture_output=True, timeout=60, check=False)


@dataclass(frozen=True)
class LiveEngine:
    """A server that answers: its address, how to tell that it is gone, and where its log is."""

    variant: EngineVariant
    url: str
    dead: Callable[[], str | None] | None
    log: Path | None
    start: int = 0  # where this start's log begins

    def log_text(self) -> str:
        """What this start of the server has logged (the first 32 MiB: choices are made while loading)."""
        if self.log is None or not self.log.is_file():
            return ""
        with self.log.open("rb") as file:
            file.seek(self.start)
            return file.read(_LOG_LIMIT).decode("utf-8", "replace")

    def attestation(self, endpoint: Endpoint) -> attest.Attestation | None:
        """Ask the server and read its log; None for this project's service, whose fingerprint says more."""
        if self.variant.spec.engine == "service":
            return None
        answers: dict[str, Any] = {}
        with preflight.Http(endpoint) as http:
            for route in attest.routes(self.variant):
                answers[route] = http.json("GET", route)
        return attest.judge(self.variant, answers, self.log_text())


@contextlib.contextmanager
def running(
    variant: EngineVariant, arm: str, log: Path, say: Callable[[str], None] = lambda text: None
) -> Iterator[LiveEngine]:
    """The variant's server, started and stopped here unless the file gives a URL.

    A server that does not come up raises `ServerError` with the end of its log in `tail`.
    """
    spec = variant.spec
    if spec.url is not None:
        say(f"{arm}: using the server at {spec.url}")
        yield LiveEngine(variant, spec.url, None, Path(spec.attest.log) if spec.attest.log else None)
        return
    made = plan(variant, spec.port or free_port(), container=f"moe-parity-{arm.replace(':', '-')}-{free_port()}")
    for text in made.elsewhere:
        say(f"{arm}: start this elsewhere: {text}")
    launch = EngineLaunch(variant.name, variant.model, log, startup_timeout=spec.ready.timeout, env=made.env,
                          ready=spec.ready.path, plan=made)
    say(f"starting the server for {arm} ({variant.name}); log: {log}")
    server = EngineServer(launch)
    begin = log.stat().st_size if log.exists() else 0
    try:
        server.__enter__()
    except ServerError as error:
        error.tail = tail(log, begin)
        raise
    try:
        yield LiveEngine(variant, server.url, server.dead, log, begin)
    finally:
        server.stop()


def tail(log: Path, begin: int = 0) -> list[str]:
    """The last lines of a log from an offset on."""
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return file.read().decode("utf-8", "replace").splitlines()[-TAIL:]
    except OSError:
        return []


def refuse(arm: str, found: attest.Attestation) -> None:
    """Stop before anything is asked when another kernel runs than the one asked for (exit code 4)."""
    if found.status in ("mismatch", "fallback") or (found.status == "unattested" and found.expected):
        raise AttestationError(f"INVALID, nothing was asked: '{arm}': {found.detail}")


def identity(variant: EngineVariant, found: attest.Attestation) -> Mapping[str, Any]:
    """For the journal's keys: answers of another image or kernel are never taken over."""
    return {"engine": variant.spec.engine, "image": variant.spec.image, "kernels": list(found.found)}
