"""From a run folder to verdicts: score the journal, check integrity, measure the floor, judge each candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evals import integrity as checks
from evals import layers
from evals.analysis import Look
from evals.data import Problems, restore
from evals.engines import attest
from evals.errors import UsageError
from evals.floor import Floor
from evals.forced.drift import drift_evidence
from evals.journal import read
from evals.pairing import PairedOutcomes, PairingError, pair
from evals.policy import Policy
from evals.protocol import describe, undeclared
from evals.records import ArmResult, Finding, Integrity, Protocol, RunMeta
from evals.rules import LayerEvidence
from evals.run_folder import RunFolder
from evals.run_options import BASELINE, CANDIDATE, REPEAT
from evals.run_score import Rows, batch_invariance, rows_of, score_run
from evals.statistics import holm
from evals.verdict import EXIT_CODES, Verdict, judge, overall


@dataclass(frozen=True, eq=False)
class Comparison:
    """One candidate against the baseline."""

    name: str
    variant: str
    outcomes: PairedOutcomes
    verdict: Verdict
    stopped: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Judged:
    """Everything a report is made of; nothing in it but `meta.timing` and items' `seconds` is wall-clock."""

    meta: RunMeta
    protocol: Protocol
    problems: Problems
    arms: tuple[ArmResult, ...]
    comparisons: tuple[Comparison, ...]
    integrity: Integrity
    floor: Floor | None
    policy: Policy

    @property
    def state(self) -> str:
        """The run's state over all its candidates."""
        return overall([c.verdict for c in self.comparisons])

    @property
    def exit_code(self) -> int:
        """The exit code that goes with the state."""
        return EXIT_CODES[overall([c.verdict for c in self.comparisons])]


def policy_of(meta: RunMeta) -> Policy:
    """The limits a run was started with."""
    return Policy(margin=meta.margin, alpha=meta.alpha, factors=meta.factors, allow_truncated=meta.allow_truncated)


def server_findings(
    folder: RunFolder, arms: Sequence[ArmResult], rows: Rows, protocol: Protocol, meta: RunMeta
) -> list[Finding]:
    """What the servers' identities, limits and behaviour say about each arm and each pair of arms."""
    found: list[Finding] = []
    by_name = {a.name: a for a in reversed(arms)}
    for name, arm in by_name.items():
        entry = folder.arm(name)
        before, after = entry.get("fingerprint_before"), entry.get("fingerprint_after")
        if entry.get("died"):
            after = before  # nothing to compare with; the missing answers speak for themselves
            found.append(Finding(
                "server-died", "inconclusive",
                f"the server of '{name}' ended during the run: {entry['died']}; go on with --resume", name,
            ))
        if name != REPEAT:
            engine = list(attest.findings(name, entry))
            found += engine
            if before is not None or not any(f.code.startswith("kernel-") for f in engine):
                found += checks.check_server(
                    name, entry.get("variant"), before, after, require_attestation=meta.require_attestation
                )
            seen, then = entry.get("observed") or {}, entry.get("observed_after")
            if then is not None and dict(then) != dict(seen):
                names = ", ".join(checks.changed(seen, then))
                found.append(Finding("server-changed", "invalid",
                                     f"the server of '{name}' changed during the run ({names}); run again", name))
            found += _invariance(rows, name)
        found += checks.check_budget(arm, protocol, entry.get("max_model_len"))
        found += _models(rows, name)
        found += checks.check_format(arm)
        if name != BASELINE and BASELINE in by_name:
            found += checks.check_prompt_tokens(by_name[BASELINE], arm, meta.factors)
            if name != REPEAT:
                found += checks.check_pair(by_name[BASELINE], arm, meta.factors)
    return found


def _invariance(rows: Rows, name: str) -> list[Finding]:
    seen = batch_invariance(rows, name)
    if seen is None:
        return []
    same, asked = seen
    if same == asked:
        text = f"'{name}': {same} of {asked} probed items gave the same text alone and inside batches"
        return [Finding("batch-invariance", "note", text, name)]
    text = f"'{name}' answers depend on the batch: {asked - same} of {asked} probed items changed when asked alone"
    return [Finding("batch-dependent", "warning", text, name)]


def _models(rows: Rows, name: str) -> list[Finding]:
    seen = {str(line["model"]) for (arm, _), items in rows.items() if arm == name
            for line in items.values() if line.get("model")}
    if len(seen) < 2:
        return []
    return [Finding("model-changed", "invalid",
                    f"'{name}' answered as several models ({', '.join(sorted(seen)[:3])}); run again", name)]


def judge_run(path: Path) -> Judged:
    """Judge a finished (or stopped) run from its folder alone."""
    folder = RunFolder.open(path)
    meta, protocol = folder.meta(), folder.protocol()
    problems = restore(folder.problems)
    rows = rows_of(read(folder.journal))
    arms = score_run(folder)
    found = server_findings(folder, arms, rows, protocol, meta)
    stored = folder.data.get("floor")
    floor = Floor.from_dict(stored) if stored else None
    stops = {name: entry["stopped"] for name, entry in folder.data["arms"].items() if entry.get("stopped")}
    looks = {name: entry["final_look"] for name, entry in folder.data["arms"].items() if entry.get("final_look")}
    return assemble(meta, protocol, problems, arms, found, floor, stops, looks, layers.load(path))


def assemble(
    meta: RunMeta,
    protocol: Protocol,
    problems: Problems,
    arms: Sequence[ArmResult],
    findings: Sequence[Finding],
    floor: Floor | None = None,
    stops: Mapping[str, Mapping[str, Any]] | None = None,
    looks: Mapping[str, Mapping[str, Any]] | None = None,
    evidence: Mapping[str, Sequence[LayerEvidence]] | None = None,
) -> Judged:
    """Pair, measure the floor and judge every candidate.

    `stops` says which candidates were stopped early and at which look; `looks` the last planned look of those that
    ran to the end with looks on the way; `evidence` what earlier layers found (`evals run all`), to which the drift of
    the free-running answers is added.
    """
    groups: dict[str, list[ArmResult]] = {}
    for arm in arms:
        groups.setdefault(arm.name, []).append(arm)
    baseline = groups.get(BASELINE)
    candidates = {n: g for n, g in groups.items() if n.startswith(CANDIDATE)}
    if not baseline or not candidates:
        raise UsageError("the run has no answers for a baseline and a candidate yet; go on with --resume")
    policy = policy_of(meta)
    if floor is None and REPEAT in groups:
        floor = Floor.measured(pair(baseline[0], groups[REPEAT][0]))
    paired: list[tuple[str, PairedOutcomes, Mapping[str, Any] | None]] = []
    for name, group in candidates.items():
        stop = (stops or {}).get(name)
        base = [_only(b, c) for b, c in zip(baseline, group, strict=False)] if stop else baseline
        try:
            paired.append((name, pair(base, group), stop))
        except PairingError as error:
            raise UsageError(f"{error}") from None
    integrity = checks.gather(findings, [a for a in arms if a.name != REPEAT])
    raw = [o.clustered.regression_p() if o.pairs else 1.0 for _, o, _ in paired]
    adjusted: list[float | None] = list(holm(raw)) if len(raw) > 1 else [None]
    comparisons = tuple(
        Comparison(name, outcomes.candidate[0].variant, outcomes, judge(
            outcomes, policy=policy, integrity=integrity, floor=floor, p_adjusted=p,
            look=_look(name, stop, looks), evidence=_evidence(outcomes, (evidence or {}).get(name)),
        ), stop)
        for (name, outcomes, stop), p in zip(paired, adjusted, strict=True)
    )
    return Judged(meta, protocol, problems, tuple(arms), comparisons, integrity, floor, policy)


def _evidence(outcomes: PairedOutcomes, stored: Sequence[LayerEvidence] | None) -> Sequence[LayerEvidence]:
    if stored is None:
        return ()
    return (*stored, layers.explained(drift_evidence(outcomes)))


def _look(
    name: str, stop: Mapping[str, Any] | None, looks: Mapping[str, Mapping[str, Any]] | None
) -> Look | None:
    found = stop.get("look") if stop else (looks or {}).get(name)
    return Look(**found) if found else None


def _only(baseline: ArmResult, candidate: ArmResult) -> ArmResult:
    """The baseline on the items a candidate was asked before it was stopped."""
    return replace(baseline, items={i: r for i, r in baseline.items.items() if i in candidate.items})


def floor_from(path: Path, protocol: Protocol, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The stored A/A floor of another run; refused unless protocol and baseline server are the same."""
    other = RunFolder.open(path)
    differing = undeclared(other.protocol(), protocol, ())
    if differing:
        name, (a, b) = next(iter(differing.items()))
        raise UsageError(f"--floor {path} has another protocol ({describe(name, a, b)}); measure a new one with --aa")
    theirs = other.data["arms"].get(BASELINE, {}).get("identity")
    if theirs != dict(identity):
        names = ", ".join(checks.changed(theirs or {}, identity))
        raise UsageError(f"--floor {path} was measured on another server ({names}); measure a new one with --aa")
    if other.data.get("floor"):
        stored: dict[str, Any] = other.data["floor"]
        return stored
    arms = {a.name: a for a in score_run(other, [BASELINE, REPEAT]) if a.repeat == 0}
    if set(arms) != {BASELINE, REPEAT}:
        raise UsageError(f"--floor {path} has no A/A run; it was made with --no-aa")
    return Floor.measured(pair(arms[BASELINE], arms[REPEAT])).as_dict()
