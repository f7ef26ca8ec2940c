"""Self-test mode: `evals selftest` switches real faults on in a running service, to prove that the gate sees them.

Part of the application only with `--selftest` and MOE_PARITY_SELFTEST=1. In this mode the fingerprint always has the
field `faults`, so that an answer given under a fault can never pass for a normal one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from moe_kernels import check as parity
from moe_kernels.capture import capture_moe_inputs
from moe_kernels.commands.check import TEXT
from moe_kernels.errors import MoeParityError
from moe_kernels.faults import Fault, all_faults, fault, inject
from service import fingerprint
from service.api.state import Service
from service.api.stream import Json
from service.engine.types import GenerationRequest, SamplingParams
from service.errors import ApiError, invalid

router = APIRouter(prefix="/selftest")
KEEP_BLOCKS = 4  # kv_block_truncated: sequences longer than this many blocks lose their oldest one
EOS_BIAS = 20.0  # short_reasoning: nats added to the end-of-sequence tokens; the embedded model's gap is 17 to 22


class FaultRequest(BaseModel):
    """`name` of a fault to switch on; null switches off."""

    model_config = ConfigDict(extra="forbid")
    name: str | None


class CheckRequest(BaseModel):
    """Kernel parity now. `sweep`: numbers of tokens."""

    model_config = ConfigDict(extra="forbid")
    sweep: list[int] = list(parity.QUICK_SWEEP)


class SelfTest:
    """The fault that is on, and the references its kernels are checked against."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.fault: Fault | None = None
        self._stack = ExitStack()
        self._references: dict[int, parity.Reference] | None = None
        self._lock = threading.Lock()

    @property
    def engine(self) -> Any:
        """The running engine."""
        return self.service.require().engine

    def switch(self, name: str | None) -> None:
        """Replace the fault that is on by another, or by none; the engine must be idle."""
        with self._lock:
            self._prepare()
            self.engine.call(lambda: self._switch(name))

    def _switch(self, name: str | None) -> None:
        self._require_idle()
        self._stack.close()
        self._stack, self.fault = ExitStack(), None
        try:
            if name is not None:
                chosen = fault(name)
                self._stack.enter_context(inject(self.engine.loaded, name))
                if chosen.engine is not None:
                    self._stack.enter_context(ENGINE_FAULTS[chosen.engine](self.engine))
                self.fault = chosen
        finally:
            self.announce()

    def announce(self) -> None:
        """Put the faults that are on into the fingerprint."""
        loaded = self.service.require()
        said = {k: v for k, v in loaded.fingerprint.items() if k != "id"} | {
            "faults": [self.fault.name] if self.fault else []
        }
        self.service.loaded = replace(loaded, fingerprint=said | {"id": fingerprint.identify(said)})

    def check(self, sweep: list[int]) -> dict[str, Any]:
        """Kernel parity of the model as it is now."""
        with self._lock:
            self._prepare()
            return self.engine.call(lambda: self._check(sweep))  # type: ignore[no-any-return]

    def _check(self, sweep: list[int]) -> dict[str, Any]:
        self._require_idle()
        began = time.monotonic()
        checkpoint = self.engine.loaded.checkpoint
        change = self.fault.record if self.fault and self.fault.record else None

        def record(layer: int) -> Any:
            original = checkpoint.experts(layer)
            return change(original) if change else original

        report = parity.check_model(self.engine.loaded, self._references or {}, sweep, records=record)
        return report.as_dict() | {"seconds": round(time.monotonic() - began, 3)}

    def _require_idle(self) -> None:
        if not self.engine.idle:
            raise ApiError(409, "requests are running; a fault can be switched only while the engine is idle")

    def _prepare(self) -> None:
        """Capture the sound model's activations on a text, once, before the first fault."""
        if self._references is not None:
            return
        loaded = self.service.require()
        ids = loaded.tokenizer.encode(TEXT)[:512]
        if len(ids) < 31:
            raise ApiError(500, f"the check's text has {len(ids)} tokens under this tokenizer, needs 31")
        model = self.engine.loaded
        with capture_moe_inputs(model.model, max_tokens=len(ids)) as seen:
            self._forward(ids)
        self._references = self.engine.call(lambda: parity.references_from(model, seen))
        self.announce()

    def _forward(self, ids: list[int]) -> None:
        done = threading.Event()
        request = GenerationRequest("selftest-text", tuple(ids), SamplingParams(max_tokens=0))
        self.engine.submit(request, lambda event: done.set() if event.finished else None, every_step=False)
        if not done.wait(300):
            raise ApiError(500, "the check's text was not forwarded in 300 s")


@contextmanager
def _kv_block_truncated(engine: Any) -> Iterator[None]:
    """The oldest KV block of a sequence longer than KEEP_BLOCKS blocks is not attended to."""
    runner, original = engine.runner, engine.runner.pack

    def pack(chunks: Any) -> Any:
        batch = original(chunks)
        for group in batch.attention.groups:
            long = group.mask.sum(-1, keepdim=True) > KEEP_BLOCKS * runner.block
            group.mask[..., : runner.block] &= ~long
        return batch

    runner.pack = pack
    try:
        yield
    finally:
        del runner.pack


@contextmanager
def _wrong_eos(engine: Any) -> Iterator[None]:
    """The end-of-sequence ids are replaced by one that the model never writes."""
    original = engine.eos_ids
    engine.eos_ids = frozenset({engine.runner.vocab - 1} - original)
    try:
        yield
    finally:
        engine.eos_ids = original


@contextmanager
def _short_reasoning(engine: Any) -> Iterator[None]:
    """End of sequence becomes likelier when a token is drawn; scores of given text do not show it."""
    runner, original = engine.runner, engine.runner.logits
    ends = sorted(engine.eos_ids)

    def logits(hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        out = original(hidden, rows)
        if rows is not None:  # rows are named for drawing, not for prompt log-probabilities
            out[:, ends] += EOS_BIAS
        return out

    runner.logits = logits
    try:
        yield
    finally:
        del runner.logits


ENGINE_FAULTS: dict[str, Callable[[Any], Any]] = {
    "kv_block_truncated": _kv_block_truncated,
    "wrong_eos": _wrong_eos,
    "short_reasoning": _short_reasoning,
}


def install(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    app.state.selftest = SelfTest(service)
    app.include_router(router)


def _of(request: Request) -> SelfTest:
    return request.app.state.selftest  # type: ignore[no-any-return]


@router.get("/faults")
def faults(request: Request) -> Response:
    """Every fault, and which one is on."""
    rows = [
        {
            "name": f.name, "source": f.source, "summary": f.summary, "row": f.row, "harmful": f.harmful,
            "formats": list(f.formats), "expected": list(f.expected),
        }
        for f in all_faults()
    ]
    on = _of(request).fault
    return Json({"faults": rows, "on": on.name if on else None})


@router.post("/fault")
def switch(body: FaultRequest, request: Request) -> Response:
    """Switch a fault on (and any other off); returns the fingerprint."""
    test = _of(request)
    try:
        test.switch(body.name)
    except MoeParityError as error:
        raise invalid("name", str(error)) from None
    return Json(test.service.require().fingerprint)


@router.post("/check")
def check(body: CheckRequest, request: Request) -> Response:
    """Kernel parity and contract of every MoE layer as it is now."""
    return Json(_of(request).check(body.sweep))
