"""The single questions a verdict is made of: is the budget too short, can it be decided, what regressed or moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evals import wording
from evals.analysis import Analysis
from evals.pairing import PairedOutcomes
from evals.policy import Policy
from evals.records import Finding
from evals.statistics import shown_regression

GateState = Literal["pass", "fail", "inconclusive", "invalid", "changed", "skipped"]


@dataclass(frozen=True)
class LayerEvidence:
    """What an earlier layer (kernel parity, routing, logprobs, ...) found; `moved` beyond its own A/A floor.

    `metrics` (name → number or text) and `svg` (one self-made figure) go into the reports unchanged.
    """

    layer: str
    moved: bool
    detail: str
    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
    svg: str | None = None


@dataclass(frozen=True)
class Reason:
    """One reason for the state: a stable code and a sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class Gate:
    """One line of the gate table and one JUnit test case."""

    name: str
    state: GateState
    summary: str


def concerns(finding: Finding, outcomes: PairedOutcomes) -> bool:
    """A finding about another candidate's arm says nothing about this comparison."""
    mine = {run.name for run in outcomes.baseline + outcomes.candidate}
    return finding.arm is None or finding.arm in mine or finding.arm.startswith("baseline")


def truncation(analysis: Analysis, policy: Policy) -> list[Reason]:
    if policy.allow_truncated:
        return []
    arms = (("baseline", analysis.baseline), ("candidate", analysis.candidate))
    over = [name for name, arm in arms if arm.answered and arm.truncated / arm.answered > policy.max_truncated]
    return [Reason("truncated", wording.truncated(analysis, policy, over))] if over else []


def holds_if_truncated_were_right(analysis: Analysis, policy: Policy) -> bool:
    """The regression stands even if every truncated candidate answer is counted right and none of the
    baseline's budget was short: then the token budget cannot be what caused it."""
    base = analysis.baseline
    if base.truncated / max(base.answered, 1) > policy.max_truncated:
        return False
    table = analysis.outcomes.truncated_as_right()
    return shown_regression(table.b, table.c, table.n, policy.delta, analysis.z, policy.min_drop / 100)


def undecidable(analysis: Analysis, policy: Policy) -> list[Reason]:
    out = []
    outcomes = analysis.outcomes
    if analysis.errors.unresolved:
        out.append(Reason("errors_left", wording.errors_left(analysis, policy)))
    if (outcomes.only_in_baseline or outcomes.only_in_candidate) and not {"items", "data"} & set(policy.factors):
        out.append(Reason("items_missing", wording.items_missing(outcomes)))
    base = analysis.baseline
    if base.accuracy < policy.needed_baseline:
        out.append(Reason("baseline_too_low", wording.baseline_too_low(analysis, policy)))
    if analysis.floor and not analysis.floor.stable:
        out.append(Reason("baseline_drifts", wording.baseline_drifts(analysis.floor)))
    return out


def regression_shown(analysis: Analysis, policy: Policy, p_worse: float) -> bool:
    """Shown: p below the level, not non-inferior, and a drop of at least `min_drop` (upper bound below it,
    or the estimate itself beyond the margin)."""
    if p_worse >= analysis.level or analysis.ni.shown:
        return False
    return analysis.difference <= -policy.delta or analysis.ni.upper < -policy.min_drop / 100


def movement(analysis: Analysis, policy: Policy, evidence: Sequence[LayerEvidence]) -> list[Reason]:
    """What moved although accuracy may be non-inferior."""
    out = []
    flips = analysis.lost if analysis.improvement else analysis.flips
    if flips and flips.p < policy.flips_alpha and flips.excess >= policy.max_excess_flips:
        out.append(Reason("flips", wording.flips(flips, lost=analysis.improvement)))
    length = analysis.length
    if length and (length.high < policy.length_low or length.low > policy.length_high):
        out.append(Reason("length", wording.length(length, policy)))
    for code, status in (("empty", analysis.empty), ("truncated_differ", analysis.truncated)):
        if status.p < policy.status_alpha:
            out.append(Reason(code, wording.status_differs(code, status)))
    out += [Reason(f"layer:{e.layer}", f"Layer '{e.layer}' moved: {e.detail}") for e in evidence if e.moved]
    return out


def warning_messages(analysis: Analysis, policy: Policy) -> list[str]:
    out = []
    for name, arm in (("baseline", analysis.baseline), ("candidate", analysis.candidate)):
        if arm.answered and arm.empty / arm.answered > policy.max_empty:
            out.append(wording.many_empty(name, arm))
    if analysis.p_worse < analysis.level:
        explained = wording.explained_by_empties(analysis)
        if explained:
            out.append(explained)
    if analysis.ni.shown and analysis.p_worse < analysis.level and analysis.ni.upper < -policy.min_drop / 100:
        out.append(wording.drop_within_margin(analysis, policy))
    if analysis.floor is None:
        out.append("No A/A run: how much the baseline differs from itself is unknown, so flips are not judged.")
    length = analysis.length
    if length and not policy.length_low <= length.estimate <= policy.length_high:
        out.append(wording.length(length, policy))
    return out
