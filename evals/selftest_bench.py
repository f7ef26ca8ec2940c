"""One server in self-test mode: its sound baseline, measured once, and each fault's answers to the same questions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from evals import data, lm, protocol, tasks
from evals.client import Ask, Client, Endpoint, Retries
from evals.errors import ServerError, UsageError
from evals.forced.collect import Comparison, collect, compare
from evals.forced.spool import Spool
from evals.forced.texts import gold_texts, long_texts
from evals.protocol import Sampling
from evals.records import ArmResult, sha256_hex
from evals.replies import Reply
from evals.run_preflight import inspect, with_model
from evals.run_score import item_results
from evals.servers import Launch, Server

TASK = "gsm8k-mini"
WIDTH = 8  # requests in flight


@dataclass(frozen=True)
class Sizes:
    """How much of each layer is measured: gold and long texts, free-running answers, A/A repeats."""

    texts: int = 16
    long: int = 1
    answers: int = 100
    repeats: int = 10
    max_tokens: int = 0  # of an answer; 0 takes the task's
    answer_caught: bool = True  # free-running answers also where an earlier layer has caught the fault


@dataclass
class Measured:
    """What the layers saw under one fault; seconds per layer. `failure`: the server could not score a text."""

    check: dict[str, Any] | None = None
    forced: Comparison | None = None
    failure: str | None = None
    answers: ArmResult | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class Bench:
    """A context manager around the server of one weight format."""

    def __init__(self, fmt: str, model: str, folder: Path, sizes: Sizes, data_path: Path | None = None) -> None:
        self.fmt, self.folder, self.sizes = fmt, folder, sizes
        log = folder / f"{fmt}.log"
        self._launch = Launch(f"{fmt}/emulated", model_for(fmt, model, folder), log,
                              extra=("--selftest", "--log-level", "warning"), env={"MOE_PARITY_SELFTEST": "1"})
        task = TASK if data_path is None else "gsm8k"
        self._spec = tasks.get(task)
        self._data = data_path
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        server = self._stack.enter_context(Server(self._launch))
        start = Endpoint(server.url, timeout=300.0)
        info = inspect(start)
        self.endpoint = with_model(start, info)
        self._http = self._stack.enter_context(httpx.Client(base_url=server.url, timeout=600.0, trust_env=False))
        self._dead = server.dead
        self.faults: list[dict[str, Any]] = self._json("GET", "/selftest/faults")["faults"]
        s = self.sizes
        raw = self._spec.load(self._data, None)
        sampling = Sampling(max_tokens=s.max_tokens or self._spec.max_tokens, concurrency=WIDTH)
        wanted = max(s.texts, s.answers)
        self.problems = data.select(raw, shots=0, limit=min(wanted, len(raw.test)), seed=sampling.seed)
        self._asks = lm.render(self._spec, self.problems, sampling)
        self._protocol = protocol.build(self._spec, self.problems, sampling)
        self.baseline = self._stack.enter_context(Spool(self.folder / f"{self.fmt}.spool"))
        self.texts = gold_texts(self.problems, self._asks)[: s.texts]
        self._collect(self.baseline)
        limit = info.max_model_len or 2048
        self.texts += long_texts(self.texts, self.baseline.lengths, limit, s.long)
        self._collect(self.baseline)
        self.answers: ArmResult | None = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _json(self, method: str, route: str, body: Any = None) -> Any:
        reply = self._http.request(method, route, json=body)
        if reply.status_code != 200:
            raise ServerError(f"self-test server: {method} {route} gives {reply.status_code}: {reply.text[:300]}")
        return reply.json()

    def switch(self, name: str | None) -> None:
        """Switch to a fault, or to none; the fingerprint must say so."""
        said = self._json("POST", "/selftest/fault", {"name": name})
        if said.get("faults") != ([name] if name else []):
            raise ServerError(f"self-test server: asked for {name}, its fingerprint has {said.get('faults')}")

    def check(self) -> dict[str, Any]:
        """Kernel parity and contract now."""
        return self._json("POST", "/selftest/check", {})  # type: ignore[no-any-return]

    def _collect(self, spool: Spool, width: int = WIDTH) -> None:
        collect(self.endpoint, self.texts, spool, routing=True, concurrency=width, dead=self._dead,
                retries=Retries(per_item=0))

    def forced(self, width: int = WIDTH) -> Comparison:
        """The texts under what is switched on now, against the sound baseline."""
        with Spool(self.folder / f"{self.fmt}-fault.spool") as spool:
            self._collect(spool, width)
            return compare(self.texts, self.baseline, spool)

    def answer(self, name: str) -> ArmResult:
        """Free-running answers to the first items."""
        rows: dict[str, dict[str, Any]] = {}
        asks = self._asks[: self.sizes.answers]

        async def main() -> None:
            async with Client(self.endpoint, self._protocol, retries=Retries(per_item=0), dead=self._dead) as client:
                async def sink(ask: Ask, reply: Reply) -> None:
                    rows[ask.item] = {
                        "prompt_sha256": sha256_hex(ask.prompt), "status": reply.status, "text": reply.text,
                        "finish_reason": reply.finish_reason, "prompt_tokens": reply.prompt_tokens,
                        "completion_tokens": reply.completion_tokens, "seconds": reply.seconds,
                        "matched_stop": reply.matched_stop, "error": reply.error,
                    }

                await client.ask_all(asks, sink, min(32, len(asks)))

        asyncio.run(main())
        return ArmResult(name, name, None, None, item_results(self.problems, rows))

    def base_answers(self) -> ArmResult:
        """The sound server's answers, asked once, when first needed."""
        if self.answers is None:
            self.switch(None)
            self.answers = self.answer("baseline")
        return self.answers

    def measure(self, name: str, *, caught: Any) -> Measured:
        """All layers under a fault; `caught(measured)` says whether the earlier layers suffice."""
        out = Measured()
        self.switch(name)
        clock = time.monotonic()

        def lap(layer: str) -> None:
            nonlocal clock
            now = time.monotonic()
            out.seconds[layer], clock = round(now - clock, 2), now

        out.check = self.check()
        lap("kernel")
        try:
            out.forced = self.forced()
        except ServerError as error:
            out.failure = str(error)
        lap("forced")
        if self.sizes.answers and (not caught(out) or (self.sizes.answer_caught and _may_answer_otherwise(out))):
            self.base_answers()
            self.switch(name)
            clock = time.monotonic()
            out.answers = self.answer(f"candidate ({name})")
            lap("answers")
        return out


def _may_answer_otherwise(seen: Measured) -> bool:
    """Could greedy answers differ? Not while every gold token has the same most likely token under both: an answer
    that is the gold solution stays the same, token by token."""
    return seen.forced is None or seen.forced.gold.summary().top1_agreement < 1


def model_for(fmt: str, model: str, folder: Path) -> str:
    """The checkpoint for a format: the model itself, or a quantised copy where the service would not make one."""
    path = Path(__file__).parent / "mini" / "model" if model == "mini" else Path(model)
    try:
        quantised = "quantization_config" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--model {model}: {error.strerror}: {error.filename}") from None
    if fmt == "fp8" or not quantised:
        return model
    target = folder / f"{fmt}-model"
    command = [sys.executable, "-m", "moe_kernels.cli", "quantize", "--format", fmt, str(path), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"cannot make an {fmt} copy of {model}: {' '.join(done.stderr.split())[-300:]}")
    return str(target)
