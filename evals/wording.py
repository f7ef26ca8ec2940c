"""Sentences of the verdict: every number with its counts, every problem with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from evals.pairing import ArmCounts, PairedOutcomes
from evals.policy import Policy
from evals.statistics import FlipTest, PairedCounts, Ratio, StatusComparison

if TYPE_CHECKING:
    from evals.analysis import Analysis, Look
    from evals.floor import Floor


def points(fraction: float, digits: int = 2) -> str:
    """A difference in points with its sign, "−0.45" or "+0.30" (true minus sign)."""
    text = f"{fraction * 100:+.{digits}f}"
    return f"{0:.{digits}f}" if float(text) == 0 else text.replace("-", "−")


def percent(fraction: float, digits: int = 2) -> str:
    """A share as "96.13 %"."""
    return f"{fraction * 100:.{digits}f} %"


def count_of(right: int, n: int) -> str:
    """Counts first, then the share: "1268/1319 (96.13 %)"."""
    return f"{right}/{n} ({percent(right / n)})" if n else f"{right}/{n}"


def p_value(p: float) -> str:
    """ "p = 0.061", and "p < 0.0001" below that."""
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.4f}" if p < 0.01 else f"p = {p:.3f}"


def plural(n: int, word: str, plural_word: str | None = None) -> str:
    """ "1 item", "2 items"."""
    return f"{n} {word if n == 1 else plural_word or word + 's'}"


def difference(analysis: Analysis) -> str:
    """ "−0.45 pt (1268/1319 → 1262/1319)"; counts over the pairs both arms answered."""
    table = analysis.table
    return f"{points(analysis.difference)} pt ({table.baseline_right}/{table.n} → {table.candidate_right}/{table.n})"


def regression(analysis: Analysis, policy: Policy, p: float) -> str:
    beyond = analysis.ni.upper < -policy.delta
    size = f"beyond the margin of {policy.margin:g} pt" if beyond else f"at least {points(-analysis.ni.upper)} pt"
    test = "McNemar mid-p" if analysis.clustered.deff == 1 else "McNemar score, clustered by item"
    adjusted = ", Holm-adjusted" if p != analysis.p_worse else ""
    return (
        f"Regression shown on this protocol, {size}: {difference(analysis)}, "
        f"{analysis.table.b} worse and {analysis.table.c} better, one-sided {p_value(p)} ({test}{adjusted}), "
        f"upper bound {points(analysis.ni.upper)} pt."
    )


def noninferior_short(analysis: Analysis, policy: Policy) -> str:
    return (
        f"{difference(analysis)}, lower bound {points(analysis.ni.lower)} pt > −{policy.margin:g} pt "
        f"(Tango, one-sided {percent(1 - analysis.level, 1)})"
    )


def noninferior(analysis: Analysis, policy: Policy) -> str:
    better = f"; improvement shown, {p_value(analysis.p_better)}" if analysis.improvement else ""
    return f"Non-inferior at {policy.margin:g} pt: {noninferior_short(analysis, policy)}{better}."


def not_shown(analysis: Analysis, policy: Policy) -> str:
    floor_n = analysis.ni.z**2 * (1 - policy.delta) / policy.delta
    if analysis.pairs <= floor_n:
        return (
            f"{plural(round(analysis.pairs), 'item')} cannot show {policy.margin:g} pt even if every answer agrees: "
            f"that takes more than {int(floor_n)} items. Seen: {difference(analysis)}."
        )
    return (
        f"Neither non-inferiority nor a regression is shown: {difference(analysis)}, one-sided lower bound "
        f"{points(analysis.ni.lower)} pt against −{policy.margin:g} pt, {p_value(analysis.p_worse)} for a regression."
    )


def below_floor(analysis: Analysis, policy: Policy) -> str:
    assert analysis.floor is not None
    noise = analysis.floor.noise(analysis.pairs, policy.alpha)
    return (
        f"The margin of {policy.margin:g} pt lies below the A/A noise of {noise * 100:.2f} pt: two runs of the "
        f"baseline differ on {count_of(analysis.floor.flips, analysis.floor.n)} of the items."
    )


def drop_within_margin(analysis: Analysis, policy: Policy) -> str:
    return (
        f"A drop is shown ({difference(analysis)}, {p_value(analysis.p_worse)}), though within the margin of "
        f"{policy.margin:g} pt."
    )


def flips(test: FlipTest, lost: bool = False) -> str:
    kind = "lost answers" if lost else "flips"
    return (
        f"{test.ab_flips} {kind} against the candidate, {test.aa_flips} between two runs of the baseline "
        f"({percent(test.ab_flips / test.ab_n)} against {percent(test.aa_flips / test.aa_n)}, {p_value(test.p)}, "
        f"{'McNemar mid-p on the same items' if test.method == 'paired' else 'Fisher, stored floor'})."
    )


def length(ratio: Ratio, policy: Policy) -> str:
    outside = ratio.high < policy.length_low or ratio.low > policy.length_high
    inside = ratio.low >= policy.length_low and ratio.high <= policy.length_high
    where = "outside" if outside else "inside" if inside else "not clearly inside"
    return (
        f"Completion length is {ratio.estimate:.3f} of the baseline's (95 % {ratio.low:.3f}–{ratio.high:.3f}), "
        f"{where} {policy.length_low:g}–{policy.length_high:g}."
    )


def status_differs(code: str, status: StatusComparison) -> str:
    name = "Empty" if code == "empty" else "Truncated"
    return (
        f"{name} answers differ between the arms: {status.baseline} against {status.candidate} of {status.n} "
        f"({status.only_candidate} only in the candidate, {status.only_baseline} only in the baseline, "
        f"{p_value(status.p_paired)} paired, {p_value(status.p_fisher)} Fisher)."
    )


def many_empty(name: str, arm: ArmCounts) -> str:
    return (
        f"{count_of(arm.empty, arm.answered)} of the {name}'s answers are empty: look at stop strings, chat "
        "template and reasoning parser before believing the accuracy."
    )


def explained_by_empties(analysis: Analysis) -> str | None:
    """The part of a drop that empty answers make: the difference among items neither arm left empty."""
    lost = analysis.empty.only_candidate - analysis.empty.only_baseline
    rest = analysis.nonempty
    net = analysis.table.b - analysis.table.c
    if lost <= 0 or net <= 0 or rest.n == 0 or (rest.b - rest.c) > net / 2:
        return None
    return (
        f"Most of the drop is empty answers: {analysis.empty.candidate} against {analysis.empty.baseline}. Among the "
        f"{rest.n} items that neither arm left empty it is {points(rest.difference)} pt "
        f"({rest.baseline_right} → {rest.candidate_right})."
    )


def truncated(analysis: Analysis, policy: Policy, over: Sequence[str]) -> str:
    base, cand = analysis.baseline, analysis.candidate
    text = (
        f"Cut by max_tokens: baseline {count_of(base.truncated, base.answered)}, candidate "
        f"{count_of(cand.truncated, cand.answered)}; more than {percent(policy.max_truncated, 1)} means that the "
        "budget decides, not the kernel."
    )
    if list(over) == ["candidate"]:
        text += (
            " The baseline fits the same budget: the candidate talks longer or does not stop "
            f"({p_value(analysis.truncated.p_paired)} paired)."
        )
    return text


def errors_left(analysis: Analysis, policy: Policy) -> str:
    worst, best, both = analysis.worst, analysis.best, analysis.errors.unresolved
    outcome = "so the answer hangs on them"
    if best.upper < 0 and best.difference <= -policy.delta:
        outcome = "so even the best case is a regression"
    elif worst.lower > -policy.delta:
        outcome = "so even the worst case would be non-inferior"
    return (
        f"{plural(both, 'item')} ended in errors and are neither right nor wrong. If all went against the candidate: "
        f"{points(worst.difference)} pt (lower bound {points(worst.lower)}); if all went for it: "
        f"{points(best.difference)} pt (lower bound {points(best.lower)}), {outcome}."
    )


def items_missing(outcomes: PairedOutcomes) -> str:
    return (
        f"{len(outcomes.only_in_baseline)} items have no answer of the candidate and "
        f"{len(outcomes.only_in_candidate)} none of the baseline."
    )


def prompts_differ(outcomes: PairedOutcomes) -> str:
    return (
        f"The arms were asked different prompts on {len(outcomes.prompt_mismatches)} of {len(outcomes.items)} items "
        f"(first {outcomes.prompt_mismatches[0]}): use the same shots, template and endpoint, or declare the factor."
    )


def baseline_too_low(analysis: Analysis, policy: Policy) -> str:
    base = analysis.baseline
    return (
        f"Baseline {count_of(base.right, base.answered)}: a baseline this low cannot support a claim "
        f"(at least {percent(policy.needed_baseline, 0)} is needed). Most items could not get worse, so agreement on "
        "them proves nothing."
    )


def baseline_drifts(floor: Floor) -> str:
    return (
        f"The baseline disagrees with itself: {floor.b} items only its first run got right, {floor.c} only its "
        f"second ({p_value(floor.p_drift)}). Something besides noise changed between two runs of one server."
    )


def headline(state: str, messages: Sequence[str], analysis: Analysis | None, policy: Policy) -> str:
    """One sentence for the top of every report."""
    first = messages[0]
    if state == "CHANGED" and analysis is not None:
        what = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
        return f"Accuracy non-inferior at {policy.margin:g} pt, but the candidate changed: {first}{what}"
    return first


def advice(state: str, codes: set[str], analysis: Analysis | None, policy: Policy) -> Iterator[str]:
    """What to do next, most useful first."""
    if "truncated" in codes:
        yield "Raise --max-tokens (and the server's max_model_len), or accept cut answers with --allow-truncated."
    if "prompts_differ" in codes:
        yield "Run both arms with the same protocol, or declare what differs with --factor."
    if "errors_left" in codes or "items_missing" in codes:
        yield "Look at the server's log, then finish the run with --resume: only missing items are asked again."
    if "baseline_too_low" in codes:
        yield "Check the prompt and the extraction against the baseline's known score, or use an easier task."
    if "baseline_drifts" in codes:
        yield "Warm the server up, fix its state (caches, autotuning, clocks) and measure the A/A floor again."
    if analysis is None or state not in ("INCONCLUSIVE", "CHANGED", "FAIL"):
        return
    needs = analysis.needs
    if codes & {"not_shown", "margin_below_floor"}:
        yield (
            f"Attainable margin with these {plural(analysis.table.n, 'answer')} at "
            f"{percent(needs.discordance)} discordance: {needs.attainable * 100:.2f} pt "
            f"({percent(policy.power, 0)} power, arms truly equal)."
        )
        more = needs.items - analysis.clustered.items
        if more > 0:
            yield f"For {policy.margin:g} pt: {needs.items} items, {more} more than now."
        elif needs.items_if_observed:
            yield (
                f"If the observed {points(analysis.difference)} pt is true, {policy.margin:g} pt takes "
                f"{needs.items_if_observed} items."
            )
        floor = analysis.floor
        if floor and floor.flips == 0:
            yield "The baseline repeats itself exactly: --repeats adds nothing, more items or the logprob layer do."
        elif needs.repeats and needs.repeats > analysis.outcomes.repeats:
            yield f"Or --repeats {needs.repeats} over the same {analysis.clustered.items} items."
        elif floor and more > 0:
            yield "No number of repeats is enough: most of the discordance is between the kernels, not between runs."
    if state in ("CHANGED", "FAIL"):
        yield "Read the flipped answers (flips.jsonl, report.html) and run the routing and logprob layers."


def stopped(kind: str, table: PairedCounts, look: Look, curtailed: bool = False) -> str:
    """Why a run stopped early."""
    what = {
        "regression": "a regression is shown",
        "noninferior": "non-inferiority is shown",
        "undecided": "neither non-inferiority nor a regression can be shown any more",
    }[kind]
    why = (
        f"no outcome of the remaining {look.planned - look.items} items can change it"
        if curtailed
        else f"O'Brien–Fleming boundary z = {look.z:.3f}"
    )
    return (
        f"Stopped at look {look.index} of {look.of} after {look.items} of {look.planned} items: {what} "
        f"({table.b} worse, {table.c} better; {why})."
    )
