"""Finds out whether an answer's bits depend on what else runs, on this machine, by running it alone and in a batch."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

import torch

from service.engine.engine import Engine
from service.engine.types import GenerationRequest, SamplingParams, StepEvent

LENGTHS = (3, 17, 40, 66, 300)
SPARSE_BEYOND = 41  # tokens
NEW_TOKENS = 6
TIMEOUT = 300.0  # seconds for one round


@dataclass(frozen=True)
class Probe:
    """`batch_invariant`: alone and in a batch gave the same bits. `repeatable`: alone, twice, did.

    `max_logprob_difference` is the largest |difference| seen over generated and prompt tokens, None if tokens differed.
    `probe` says in words what was compared.
    """

    batch_invariant: bool
    repeatable: bool
    max_logprob_difference: float | None
    probe: str

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run_probe(engine: Engine, rounds: int = 2) -> Probe:
    """Greedy answers to five random prompts, alone and together, `rounds` times; the engine must be running.

    Prompts that do not fit the engine's limits are shortened. Takes about 80 small steps. A model with sparse attention
    gets another prompt, long enough that tokens are left out.
    """
    generator = torch.Generator().manual_seed(20)
    longest = max(1, engine.max_model_len - NEW_TOKENS)
    sparse_from = getattr(getattr(engine.runner, "kind", None), "sparse_from", None)
    lengths = LENGTHS if sparse_from is None else (*LENGTHS, sparse_from + SPARSE_BEYOND)
    prompts = [torch.randint(0, engine.runner.vocab, (min(n, longest),), generator=generator).tolist()
               for n in lengths]
    alone = [_run(engine, [prompt])[0] for prompt in prompts]
    batches = [_run(engine, prompts) for _ in range(rounds)]
    pairs = [(alone, batch) for batch in batches]
    if engine.runner.padded_sizes:  # prompts whose own log-probabilities are wanted are never padded: again without
        ends = [answer[-NEW_TOKENS:] for answer in alone]
        padded = [_run(engine, [prompt], scored=False)[0] for prompt in prompts]
        pairs += [(ends, padded), (ends, _run(engine, prompts, scored=False))]
    invariant = all(one == other for one, other in pairs)
    repeatable = all(_run(engine, [prompt]) == [answer] for prompt, answer in zip(prompts, alone, strict=True))
    tokens, difference = True, 0.0
    for these, those in pairs:
        for one, other in zip(these, those, strict=True):
            tokens = tokens and [t for t, _ in one] == [t for t, _ in other]
            difference = max([difference, *(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True))])
    total = sum(len(answer) for answer in alone)
    said = "bit-equal" if invariant else f"max |logprob difference| {difference:.1e}" if tokens else "tokens differ"
    return Probe(invariant, repeatable, difference if tokens else None,
                 f"{len(prompts)} random prompts, {total} log-probabilities, alone and in {rounds} batches: {said}")


def _run(engine: Engine, prompts: list[list[int]], *, scored: bool = True) -> list[list[tuple[int, float]]]:
    """(token, logprob) of every generated and (`scored`) prompt token of each prompt, run together."""
    answers: dict[str, StepEvent] = {}
    done = threading.Event()

    def sink(event: StepEvent) -> None:
        answers[event.request_id] = event
        if len(answers) == len(prompts):
            done.set()

    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True,
                            prompt_logprobs=0 if scored else None)
    names = [f"probe-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(GenerationRequest(name, tuple(prompt), params), sink, every_step=False)
    if not done.wait(TIMEOUT):
        for name in names:
            engine.cancel(name)
        raise TimeoutError(f"the determinism probe did not finish in {TIMEOUT:.0f} s")
    out = []
    for name in names:
        event = answers[name]
        if event.error is not None:
            raise event.error
        tokens = [*(event.prompt_logprobs or [])[1:], *event.new_tokens]
        out.append([(token.token_id, token.logprob) for token in tokens if token is not None])
    return out
