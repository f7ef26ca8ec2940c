"""Load on engines of this process, without HTTP."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from moe_kernels.errors import MoeParityError, VariantError
from service.bench.rounds import Answered, Load
from service.engine.engine import Engine
from service.engine.types import GenerationRequest, SamplingParams, StepEvent

_numbers = itertools.count()


class EngineTarget:
    """An engine, or one of the variants that an engine switches between."""

    def __init__(self, name: str, engine: Engine, variant: int | None = None) -> None:
        self.name, self.engine, self.variant = name, engine, variant
        self.vocab = engine.runner.vocab

    def run(self, load: Load) -> list[Answered]:
        """Keep `concurrency` requests going until all prompts are answered."""
        if self.variant is not None:
            number = self.variant
            self.engine.call(lambda: self.engine.runner.use(number))
        answers: list[Answered] = []
        left = iter(load.prompts)
        open_requests = len(load.prompts)
        done, lock = threading.Event(), threading.Lock()

        def start_next() -> None:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                return
            answer = Answered(time.perf_counter())
            answers.append(answer)

            def sink(event: StepEvent) -> None:
                nonlocal open_requests
                if event.new_tokens:
                    answer.tokens.append(time.perf_counter())
                    answer.count += len(event.new_tokens)
                if event.finished:
                    answer.error = str(event.error) if event.error else None
                    start_next()
                    with lock:
                        open_requests -= 1
                        if not open_requests:
                            done.set()

            params = SamplingParams(load.output, temperature=0.0, ignore_eos=True)
            self.engine.submit(GenerationRequest(f"bench-{next(_numbers)}", tuple(prompt), params), sink)

        for _ in range(min(load.concurrency, len(load.prompts))):
            start_next()
        while not done.wait(1.0):
            if not self.engine.healthy:
                raise MoeParityError(f"the engine failed: {self.engine.fatal}")
        return answers


def targets(engine: Engine, variants: Sequence[str]) -> list[EngineTarget]:
    """One target a variant, the first the one loaded; VariantError where they do not share prepared weights."""
    out = [EngineTarget(variants[0], engine, 0 if len(variants) > 1 else None)]
    if len(variants) > 1 and not hasattr(engine.runner, "add_variant"):
        raise VariantError("this engine cannot switch variants")
    for name in variants[1:]:
        number = engine.call(lambda name=name: engine.runner.add_variant(name))  # type: ignore[misc]
        out.append(EngineTarget(name, engine, number))
    return out
