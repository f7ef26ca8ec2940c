"""Every number of one comparison, computed once: the verdict's rule and the reports only read it."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import norm

from evals.floor import Floor, compare_flips
from evals.pairing import TRUNCATED, ArmCounts, ErrorBounds, PairedOutcomes
from evals.policy import Policy
from evals.statistics import (
    Clustered,
    FlipTest,
    NonInferiority,
    PairedCounts,
    Ratio,
    StatusComparison,
    attainable_margin,
    compare_status,
    critical,
    equivalence,
    length_ratio,
    mcnemar_exact,
    mcnemar_midp,
    newcombe_interval,
    noninferiority,
    recovery,
    required_items,
    required_repeats,
    tango_interval,
    tango_lower,
    tango_upper,
    wilson,
)


@dataclass(frozen=True)
class Look:
    """Which planned look this is; `z` is its critical value (O'Brien–Fleming)."""

    index: int
    of: int
    items: int
    planned: int
    z: float


@dataclass(frozen=True)
class Bound:
    """A table with its difference and one-sided bounds (fractions): what unresolved items could make of
    it."""

    table: PairedCounts
    difference: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Needs:
    """What the margin would take: fractions, items and repeats; None where no number is enough."""

    discordance: float
    attainable: float
    items: int
    items_if_observed: int | None
    repeats: int | None


@dataclass(frozen=True, eq=False)
class Analysis:
    """The numbers of one comparison. Differences, bounds and shares are fractions; p-values one-sided."""

    outcomes: PairedOutcomes
    table: PairedCounts
    clustered: Clustered
    baseline: ArmCounts
    candidate: ArmCounts
    wilson_baseline: tuple[float, float]
    wilson_candidate: tuple[float, float]
    z: float
    level: float
    ni: NonInferiority
    tango: tuple[float, float]
    newcombe: tuple[float, float]
    p_worse: float
    p_worse_exact: float
    p_better: float
    equivalence_p: float
    recovery: Ratio | None
    length: Ratio | None
    empty: StatusComparison
    truncated: StatusComparison
    nonempty: PairedCounts
    completed: PairedCounts
    errors: ErrorBounds
    worst: Bound
    best: Bound
    floor: Floor | None
    flips: FlipTest | None
    lost: FlipTest | None
    needs: Needs
    look: Look | None

    @property
    def difference(self) -> float:
        """Candidate minus baseline accuracy over the valid pairs."""
        return self.clustered.difference

    @property
    def pairs(self) -> float:
        """Effective number of independent pairs."""
        return self.clustered.effective[2]

    @property
    def improvement(self) -> bool:
        return self.p_better < self.level


def bound(table: PairedCounts, z: float) -> Bound:
    """Difference and Tango bounds of a table."""
    return Bound(
        table,
        table.difference,
        float(tango_lower(table.b, table.c, table.n, z)),
        float(tango_upper(table.b, table.c, table.n, z)),
    )


def analyse(
    outcomes: PairedOutcomes, policy: Policy, floor: Floor | None = None, look: Look | None = None
) -> Analysis | None:
    """All numbers of a comparison; None when no item was answered by both arms."""
    if outcomes.pairs == 0:
        return None
    table, cluster = outcomes.counts, outcomes.clustered
    b, c, n = cluster.effective
    z = look.z if look else critical(policy.alpha)
    baseline, candidate = outcomes.arm_counts("baseline"), outcomes.arm_counts("candidate")
    swapped = Clustered(cluster.items, cluster.pairs, cluster.c, cluster.b, cluster.deff, cluster.se)
    errors = outcomes.error_bounds()
    lengths = outcomes.lengths
    low, high = tango_interval(b, c, n)
    return Analysis(
        outcomes=outcomes,
        table=table,
        clustered=cluster,
        baseline=baseline,
        candidate=candidate,
        wilson_baseline=wilson(baseline.right, baseline.answered),
        wilson_candidate=wilson(candidate.right, candidate.answered),
        z=z,
        level=float(norm.sf(z)),
        ni=noninferiority(b, c, n, policy.delta, z=z),
        tango=(float(low), float(high)),
        newcombe=newcombe_interval(table),
        p_worse=cluster.regression_p(),
        p_worse_exact=mcnemar_exact(table.b, table.c),
        p_better=swapped.regression_p(),
        equivalence_p=equivalence(b, c, n, policy.delta, policy.alpha)[1],
        recovery=recovery(table) if table.baseline_right else None,
        length=length_ratio(*lengths) if len(lengths[0]) >= 2 and sum(lengths[0]) > 0 else None,
        empty=_compare(outcomes, ("empty",)),
        truncated=_compare(outcomes, TRUNCATED),
        nonempty=outcomes.without(("empty",)),
        completed=outcomes.without(("empty", *TRUNCATED)),
        errors=errors,
        worst=bound(errors.worst, z),
        best=bound(errors.best, z),
        floor=floor,
        flips=compare_flips(floor, outcomes) if floor else None,
        lost=compare_flips(floor, outcomes, losses_only=True) if floor else None,
        needs=_needs(outcomes, policy, floor),
        look=look,
    )


def _compare(outcomes: PairedOutcomes, statuses: tuple) -> StatusComparison:
    """Statuses compared over valid pairs only."""
    keep = outcomes.valid.ravel()
    x = [s for s, ok in zip(outcomes.status("baseline", statuses), keep, strict=True) if ok]
    y = [s for s, ok in zip(outcomes.status("candidate", statuses), keep, strict=True) if ok]
    return compare_status(x, y)


def _needs(outcomes: PairedOutcomes, policy: Policy, floor: Floor | None) -> Needs:
    """Planning from what was seen: the larger of the observed and the A/A discordance."""
    table, cluster = outcomes.counts, outcomes.clustered
    run = floor.discordance if floor else 0.0
    psi = max(table.discordance, run)
    observed = cluster.difference
    if_observed = None
    if -policy.delta < observed < 0:
        if_observed = required_items(policy.delta, psi, policy.alpha, policy.power, observed)
    # repeats average the run-to-run part only; without a floor the split is unknown
    repeats = None
    if floor and run > 0:
        repeats = required_repeats(policy.delta, run, cluster.items, max(psi - run, 0.0), policy.alpha, policy.power)
    return Needs(
        discordance=psi,
        attainable=attainable_margin(psi, cluster.effective[2], policy.alpha, policy.power),
        items=required_items(policy.delta, psi, policy.alpha, policy.power),
        items_if_observed=if_observed,
        repeats=repeats,
    )


def regression_midp(table: PairedCounts) -> float:
    """One-sided mid-p of a plain table (for what-if tables)."""
    return float(mcnemar_midp(table.b, table.c))
