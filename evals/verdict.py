"""The rule that turns numbers, integrity and evidence into one of five states; docs/statistics.md has its
table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from evals import wording
from evals.analysis import Analysis, Look, analyse
from evals.floor import Floor
from evals.gates import gates
from evals.pairing import PairedOutcomes
from evals.policy import Policy
from evals.records import Integrity
from evals.rules import (
    Gate,
    LayerEvidence,
    Reason,
    concerns,
    holds_if_truncated_were_right,
    movement,
    regression_shown,
    truncation,
    undecidable,
    warning_messages,
)
from evals.statistics import Looks, curtail, holm, shown_noninferior, shown_regression

State = Literal["PASS", "FAIL", "INCONCLUSIVE", "INVALID", "CHANGED"]

EXIT_CODES: dict[State, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "INVALID": 4, "CHANGED": 5}
# one run, several candidates: the state of the run is the first of these that any candidate has
PRECEDENCE: tuple[State, ...] = ("FAIL", "INVALID", "INCONCLUSIVE", "CHANGED", "PASS")


@dataclass(frozen=True, eq=False)
class Verdict:
    """The judgement of one candidate. `headline` is one sentence; `reasons` why; `advice` what to do next."""

    state: State
    headline: str
    reasons: tuple[Reason, ...]
    advice: tuple[str, ...]
    warnings: tuple[str, ...]
    gates: tuple[Gate, ...]
    analysis: Analysis | None
    p_adjusted: float | None = None
    evidence: tuple[LayerEvidence, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]


def judge(
    outcomes: PairedOutcomes,
    *,
    policy: Policy | None = None,
    integrity: Integrity | None = None,
    floor: Floor | None = None,
    evidence: Sequence[LayerEvidence] = (),
    look: Look | None = None,
    p_adjusted: float | None = None,
) -> Verdict:
    """Judge one candidate against the baseline.

    `p_adjusted` replaces the regression p when several candidates are judged together (Holm; see
    `judge_all`). The order of the rule: invalid → not decidable (errors, baseline too low, drifting
    baseline) → regression → non-inferiority, which noise above the margin or movement elsewhere turn into
    INCONCLUSIVE or CHANGED → INCONCLUSIVE.
    """
    policy, integrity = policy or Policy(), integrity or Integrity()
    analysis = analyse(outcomes, policy, floor, look)
    findings = [f for f in integrity.findings if concerns(f, outcomes)]
    warnings = [f.message for f in findings if f.severity == "warning"]
    invalid = [Reason(f.code, f.message) for f in findings if f.severity == "invalid"]
    blocked = [Reason(f.code, f.message) for f in findings if f.severity == "inconclusive"]
    if outcomes.prompt_mismatches and not policy.prompts_may_differ:
        invalid.append(Reason("prompts_differ", wording.prompts_differ(outcomes)))
    if analysis is None:
        blocked.append(Reason("no_answers", "No item was answered by both arms: there is nothing to compare."))
        return _finish(
            "INVALID" if invalid else "INCONCLUSIVE",
            invalid or blocked,
            outcomes,
            None,
            policy,
            integrity,
            evidence,
            warnings,
            p_adjusted,
        )
    cut = truncation(analysis, policy)
    blocked += undecidable(analysis, policy)
    p_worse = analysis.p_worse if p_adjusted is None else p_adjusted
    regression = regression_shown(analysis, policy, p_worse)
    moved = movement(analysis, policy, evidence)
    warnings += warning_messages(analysis, policy)

    state: State
    if invalid:
        state, reasons = "INVALID", invalid + cut
    elif cut and not (regression and holds_if_truncated_were_right(analysis, policy)):
        state, reasons = "INVALID", cut
    elif blocked:
        state, reasons = "INCONCLUSIVE", blocked
    elif regression:
        state, reasons = "FAIL", [Reason("regression", wording.regression(analysis, policy, p_worse)), *cut]
    elif not analysis.ni.shown:
        state, reasons = "INCONCLUSIVE", [Reason("not_shown", wording.not_shown(analysis, policy))]
    elif floor and policy.delta < floor.noise(analysis.pairs, policy.alpha):
        state, reasons = "INCONCLUSIVE", [Reason("margin_below_floor", wording.below_floor(analysis, policy))]
    elif moved:
        state, reasons = "CHANGED", moved
    else:
        state, reasons = "PASS", [Reason("noninferior", wording.noninferior(analysis, policy))]
    if state == "INVALID":  # mending that would not be enough: say so now, not after the next run
        warnings += [r.message for r in blocked]
    if state in ("FAIL", "INCONCLUSIVE"):
        warnings += [r.message for r in moved if r.code not in {x.code for x in reasons}]
    return _finish(state, reasons, outcomes, analysis, policy, integrity, evidence, warnings, p_adjusted)


def _finish(
    state: State,
    reasons: Sequence[Reason],
    outcomes: PairedOutcomes,
    analysis: Analysis | None,
    policy: Policy,
    integrity: Integrity,
    evidence: Sequence[LayerEvidence],
    warnings: Sequence[str],
    p_adjusted: float | None,
) -> Verdict:
    return Verdict(
        state=state,
        headline=wording.headline(state, [r.message for r in reasons], analysis, policy),
        reasons=tuple(reasons),
        advice=tuple(wording.advice(state, {r.code for r in reasons}, analysis, policy)),
        warnings=tuple(dict.fromkeys(warnings)),
        gates=tuple(gates(outcomes, analysis, policy, integrity, evidence, p_adjusted)),
        analysis=analysis,
        p_adjusted=p_adjusted,
        evidence=tuple(evidence),
    )


def judge_all(
    comparisons: Sequence[PairedOutcomes],
    *,
    policy: Policy | None = None,
    integrity: Integrity | None = None,
    floor: Floor | None = None,
    evidence: Sequence[Sequence[LayerEvidence]] | None = None,
    look: Look | None = None,
) -> tuple[Verdict, ...]:
    """Judge several candidates against one baseline.

    "Which one regressed" is a family of claims: their p-values are Holm-adjusted. "All pass" needs no
    correction (each must pass at alpha: intersection–union).
    """
    layers = list(evidence) if evidence is not None else [()] * len(comparisons)
    raw = [o.clustered.regression_p() if o.pairs else 1.0 for o in comparisons]
    adjusted: list[float | None] = list(holm(raw)) if len(comparisons) > 1 else [None]
    return tuple(
        judge(outcomes, policy=policy, integrity=integrity, floor=floor, evidence=layer, look=look, p_adjusted=p)
        for outcomes, layer, p in zip(comparisons, layers, adjusted, strict=True)
    )


def overall(verdicts: Sequence[Verdict]) -> State:
    """The state of a run with several candidates."""
    states = {v.state for v in verdicts}
    return next(state for state in PRECEDENCE if state in states)


def final_look(looks: Looks) -> Look:
    """The last planned look, for a run that went to the end with interim looks on the way: its critical value is
    above the single test's (1.733 against 1.645 for four looks), which pays for the earlier ones."""
    n = looks.items[-1]
    return Look(len(looks.items), len(looks.items), n, n, looks.z[-1])


@dataclass(frozen=True)
class Stop:
    """An early stop: `kind` is "regression", "noninferior" (a boundary was crossed) or "curtailed"
    (settled)."""

    kind: Literal["regression", "noninferior", "curtailed"]
    message: str
    look: Look


def interim(
    outcomes: PairedOutcomes, looks: Looks, policy: Policy | None = None, *, stop_for_success: bool = True
) -> Stop | None:
    """Ask at a planned look whether the run may stop; None = go on. Single runs only (repeats run to the
    end).

    The error rates hold for looks at the planned numbers of items in an order fixed beforehand (shuffled
    once). Errors left make every stop wait. Exact curtailment stops when no outcome of the remaining items
    can change the final accuracy answer.
    """
    policy = policy or Policy()
    table, n = outcomes.counts, looks.items[-1]
    index = looks.at(len(outcomes.items))
    if index is None or outcomes.repeats != 1 or table.n != len(outcomes.items):
        return None
    look = Look(index + 1, len(looks.items), table.n, n, looks.z[index])
    if table.n == n:
        return None
    drop = policy.min_drop / 100
    if shown_regression(table.b, table.c, table.n, policy.delta, look.z, drop):
        return Stop("regression", wording.stopped("regression", table, look), look)
    if stop_for_success and shown_noninferior(table.b, table.c, table.n, policy.delta, look.z):
        return Stop("noninferior", wording.stopped("noninferior", table, look), look)
    settled = curtail(table.b, table.c, table.n, n, policy.delta, looks.z[-1], drop)
    if settled:
        final = replace(look, z=looks.z[-1])
        return Stop("curtailed", wording.stopped(settled, table, look, curtailed=True), final)
    return None
