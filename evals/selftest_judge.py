"""Judges each fault by the limits of real runs, and by other projects' gates on the same data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evals.analysis import analyse
from evals.forced.collect import Comparison
from evals.forced.limits import Limits, logprob_evidence, routing_evidence
from evals.forced.run import parts_of
from evals.pairing import PairedOutcomes, pair
from evals.policy import Policy
from evals.records import ArmResult
from evals.rules import movement, regression_shown, truncation
from evals.selftest_bench import Measured

LAYERS = ("contract", "kernel", "routing", "logprobs", "length", "accuracy")
GATES = ("flashinfer", "vllm", "sglang", "trtllm", "plain")  # other projects', see `others`
_LENGTH = {"length", "empty", "truncated_differ", "truncated"}
N_FULL = 1319


@dataclass
class Row:
    """One fault: which layers saw it, how large it was, what it took, which foreign gates saw it."""

    name: str
    source: str
    summary: str
    fmt: str
    harmful: bool
    catalogue: int | None = None
    caught: dict[str, str] = field(default_factory=dict)  # layer -> effect
    measured: dict[str, str] = field(default_factory=dict)  # layer -> effect, also where it did not move
    seconds: dict[str, float] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    items: dict[str, int] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Harmful and caught, or benign and passed."""
        return bool(self.caught) == self.harmful

    cause: str = ""  # "routing": kernel parity failed only where other experts were chosen

    @property
    def first(self) -> str | None:
        """The layer to name: routing where it explains what kernel parity saw, else the cheapest that caught it."""
        if self.cause in self.caught:
            return self.cause
        return next((x for x in LAYERS if x in self.caught), None)


def judge_row(
    fault: Mapping[str, Any], fmt: str, seen: Measured, floor: Comparison, base: ArmResult | None,
    sound: Mapping[str, Any], limits: Limits | None = None,
) -> Row:
    """Which layers moved under a fault. `floor`: the A/A comparison; `sound`: the check of the sound kernels."""
    limits = limits or Limits()
    row = Row(fault["name"], fault["source"], fault["summary"], fmt, fault["harmful"], fault.get("row"),
              seconds=dict(seen.seconds))
    if seen.check is not None:
        _kernel(row, seen.check)
    _forced(row, seen, floor, limits)
    outcomes = None
    if seen.answers is not None and base is not None:
        outcomes = pair(base, seen.answers)
        _answers(row, outcomes)
    row.others = tuple(others(seen.check, sound, outcomes))
    return row


def _kernel(row: Row, check: Mapping[str, Any]) -> None:
    findings = check["findings"]
    parity = [f for f in findings if f["probe"] == "parity" and f["detail"].startswith("against the emulation")]
    values = [_number(f["value"]) for f in parity]
    worst = max(values, default=0.0)
    row.measured["kernel"] = "NaN" if math.isinf(worst) else f"calc_diff {worst:.2g}"
    for layer, probes in (("contract", {"contract"}), ("kernel", {f["probe"] for f in findings} - {"contract"})):
        bad = [f for f in findings if f["probe"] in probes and not f["ok"]]
        row.items[layer] = 0
        if bad:
            if layer == "kernel" and all(f.get("cause") == "routing" for f in bad):
                row.cause = "routing"
            names = sorted({f["probe"] for f in bad})
            peak = max(_number(f["value"]) for f in bad)
            size = "NaN" if math.isinf(peak) else f"{peak:.2g}"
            row.caught[layer] = f"{', '.join(names)}: calc_diff {size}" if layer == "kernel" else bad[0]["detail"]


def _number(value: Any) -> float:
    """A finding's value; NaN and infinities, which JSON carries as text, count as infinite."""
    number = float(value)
    return number if math.isfinite(number) else math.inf


def _forced(row: Row, seen: Measured, floor: Comparison, limits: Limits) -> None:
    if seen.failure is not None:
        row.caught["logprobs"] = row.measured["logprobs"] = "NaN"
        return
    if seen.forced is None:
        return
    layers = seen.forced.routing.by_layer()
    routing = routing_evidence(layers, floor.routing.by_layer(), limits, seen.forced.routing.gaps_known)
    parts = parts_of(seen.forced)
    logprobs = logprob_evidence(parts, parts_of(floor), True, limits)
    flips, beyond = max(1 - x.exact for x in layers), max(x.beyond_ties for x in layers)
    row.measured["routing"] = f"{100 * flips:.2g} % flips, {100 * beyond:.2g} % beyond ties"
    kl = max(parts.values(), key=lambda s: s.mean_kl)
    row.measured["logprobs"] = f"KL {kl.mean_kl:.2g}"
    row.items["routing"] = row.items["logprobs"] = sum(s.texts for s in parts.values())
    for layer, evidence in (("routing", routing), ("logprobs", logprobs)):
        if evidence.moved:
            row.caught[layer] = row.measured[layer]


def _answers(row: Row, outcomes: PairedOutcomes) -> None:
    policy = Policy()
    analysis = analyse(outcomes, policy)
    row.items["length"] = row.items["accuracy"] = len(outcomes.items)
    if analysis is None:  # every answer failed: an error, never a wrong answer
        row.caught["length"] = row.measured["length"] = "no answer"
        return
    table = analysis.table
    row.measured["accuracy"] = f"{analysis.baseline.right} → {analysis.candidate.right} of {table.n}"
    ratio = analysis.length.estimate if analysis.length else float("nan")
    row.measured["length"] = f"length ×{ratio:.2f}, cut {analysis.candidate.truncated}"
    reasons = {r.code for r in (*movement(analysis, policy, ()), *truncation(analysis, policy))}
    if analysis.candidate.error or reasons & _LENGTH:
        row.caught["length"] = row.measured["length"]
    if regression_shown(analysis, policy, analysis.p_worse):
        row.caught["accuracy"] = row.measured["accuracy"]


def others(
    check: Mapping[str, Any] | None, sound: Mapping[str, Any], outcomes: PairedOutcomes | None
) -> list[str]:
    """Foreign gates that would have seen it; one that rejects the sound kernel too counts as blind.

    - flashinfer: torch.isclose(atol .1, rtol .85) for at least 79 % of the elements of a layer's output;
    - vllm: torch.testing with atol = rtol = .035 for every element, or accuracy more than 0.08 below the reference;
    - sglang: accuracy on the first 200 questions at least 3 points below the reference;
    - trtllm: accuracy below the reference - 3.20 points (alpha .05, sigma 50, 1,319 questions);
    - plain: accuracy significantly lower by an unpaired one-sided 5 % test on 1,319 questions.

    Accuracies are those of the items asked; for gates on more items they stand in for what more would have shown.
    """
    out = []
    if check is not None and sound["isclose_share"] >= 0.79 > check["isclose_share"]:
        out.append("flashinfer")
    vllm = check is not None and sound["vllm_share"] >= 1.0 > check["vllm_share"]
    if outcomes is None:
        return [*out, *(["vllm"] if vllm else [])]
    n = len(outcomes.items)
    before = int(outcomes.right_baseline.sum()) / n
    after = int((outcomes.right_candidate & outcomes.valid).sum()) / n  # these gates count errors as wrong
    if vllm or after < before - 0.08:
        out.append("vllm")
    if after < before - 0.03:
        out.append("sglang")
    if after < before - 0.032:
        out.append("trtllm")
    pooled = (before + after) / 2
    error = math.sqrt(max(2 * pooled * (1 - pooled) / N_FULL, 1e-12))
    if (before - after) / error > 1.6449:
        out.append("plain")
    return out
