"""The gate table: one line, and one JUnit case, per question a comparison answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evals import wording
from evals.analysis import Analysis
from evals.pairing import PairedOutcomes
from evals.policy import Policy
from evals.records import Integrity
from evals.rules import Gate, LayerEvidence, concerns, movement, regression_shown, truncation, undecidable


def gates(
    outcomes: PairedOutcomes,
    analysis: Analysis | None,
    policy: Policy,
    integrity: Integrity,
    evidence: Sequence[LayerEvidence],
    p_adjusted: float | None,
) -> Iterator[Gate]:
    """All gates in a fixed order; one that could not be judged is "skipped" with the reason."""
    yield _integrity(outcomes, analysis, policy, integrity)
    yield _attestation(outcomes, integrity)
    if analysis is None:
        for name in ("accuracy-non-inferiority", "regression", "flips", "length", "determinism"):
            yield Gate(name, "skipped", "no item was answered by both arms")
    else:
        p = analysis.p_worse if p_adjusted is None else p_adjusted
        yield from _accuracy(analysis, policy, p)
        yield from _movement(analysis, policy)
        yield _determinism(analysis, policy)
    for layer in evidence:
        yield Gate(f"layer-{layer.layer}", "changed" if layer.moved else "pass", layer.detail)


def _integrity(outcomes: PairedOutcomes, analysis: Analysis | None, policy: Policy, integrity: Integrity) -> Gate:
    findings = [f for f in integrity.findings if concerns(f, outcomes)]
    invalid = [f.message for f in findings if f.severity == "invalid"]
    if outcomes.prompt_mismatches and not policy.prompts_may_differ:
        invalid.append(wording.prompts_differ(outcomes))
    if analysis is not None:
        invalid += [r.message for r in truncation(analysis, policy)]
    if invalid:
        return Gate("integrity", "invalid", " ".join(invalid))
    open_points = [f.message for f in findings if f.severity == "inconclusive"]
    if analysis is not None:
        open_points += [r.message for r in undecidable(analysis, policy)]
    else:
        open_points.append("No item was answered by both arms.")
    if open_points:
        return Gate("integrity", "inconclusive", " ".join(open_points))
    assert analysis is not None
    base, cand = analysis.baseline, analysis.candidate
    return Gate(
        "integrity",
        "pass",
        f"{len(outcomes.items)} items paired; empty/truncated/errors "
        f"{base.empty}/{base.truncated}/{base.error} → {cand.empty}/{cand.truncated}/{cand.error}",
    )


def _attestation(outcomes: PairedOutcomes, integrity: Integrity) -> Gate:
    name = "kernel-attested"
    names = [outcomes.baseline[0].name, outcomes.candidate[0].name]
    said = {n: integrity.attestation[n] for n in names if n in integrity.attestation}
    if not said:
        return Gate(name, "skipped", "no server fingerprint was read")
    summary = ", ".join(f"{n}: {said[n]}" for n in said)
    if len(said) == len(names) and all(v == "attested" for v in said.values()):
        return Gate(name, "pass", summary)
    return Gate(name, "skipped", f"{summary} (a server without a fingerprint says nothing about its kernels)")


def _accuracy(analysis: Analysis, policy: Policy, p: float) -> Iterator[Gate]:
    regression = regression_shown(analysis, policy, p)
    if analysis.ni.shown:
        noisy = analysis.floor is not None and policy.delta < analysis.floor.noise(analysis.pairs, policy.alpha)
        text = wording.below_floor(analysis, policy) if noisy else wording.noninferior(analysis, policy)
        yield Gate("accuracy-non-inferiority", "inconclusive" if noisy else "pass", text)
    elif regression:
        yield Gate("accuracy-non-inferiority", "fail", f"not shown: {wording.regression(analysis, policy, p)}")
    else:
        yield Gate("accuracy-non-inferiority", "inconclusive", wording.not_shown(analysis, policy))
    if regression:
        yield Gate("regression", "fail", wording.regression(analysis, policy, p))
    else:
        yield Gate("regression", "pass", f"none shown: {wording.difference(analysis)}, {wording.p_value(p)}")


def _movement(analysis: Analysis, policy: Policy) -> Iterator[Gate]:
    moved = {r.code: r.message for r in movement(analysis, policy, ())}
    if analysis.flips is None:
        table = analysis.table
        yield Gate("flips", "skipped", f"{table.b} worse, {table.c} better; no A/A run to compare with")
    else:
        text = moved.get("flips", wording.flips(analysis.flips))
        yield Gate("flips", "changed" if "flips" in moved else "pass", text)
    if analysis.length is None:
        yield Gate("length", "skipped", "the servers report no completion tokens")
    else:
        yield Gate("length", "changed" if "length" in moved else "pass", wording.length(analysis.length, policy))


def _determinism(analysis: Analysis, policy: Policy) -> Gate:
    floor = analysis.floor
    if floor is None:
        return Gate("determinism", "skipped", "no A/A run")
    noise = f"noise {floor.noise(analysis.pairs, policy.alpha) * 100:.2f} pt"
    texts = "" if floor.texts_differ is None else f", {wording.count_of(floor.texts_differ, floor.n)} texts differ"
    summary = f"A/A: {wording.count_of(floor.flips, floor.n)} flips{texts}, {noise} ({floor.source})"
    if not floor.stable:
        return Gate("determinism", "inconclusive", wording.baseline_drifts(floor))
    return Gate("determinism", "pass", summary)
