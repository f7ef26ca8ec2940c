"""Statistics, verdict and report cases of the pain catalogue, each under its number (docs/statistics.md lists them)."""

from __future__ import annotations

import math

import pytest
from scipy.stats import fisher_exact, norm

from evals.floor import Floor
from evals.pairing import pair
from evals.policy import Policy
from evals.report import markdown, terminal
from evals.report.model import build
from evals.statistics import PairedCounts, length_ratio, mcnemar_exact, mcnemar_midp, recovery, tango_interval
from evals.verdict import judge
from tests.evals.arms import arm, arms, second_run
from tests.evals.judging import judged

TABLE = (1250, 17, 9, 43)


def test_t04_truncation_above_half_a_percent_is_invalid() -> None:
    """vLLM PR #49881: cut chains of thought scored as valid wrong numbers; ours are a class of their own."""
    cut = dict.fromkeys(range(1267, 1274), "truncated")  # 7 of 1319 = 0.53 %, wrong ones
    base, cand = arms(*TABLE, base={"statuses": cut}, cand={"statuses": cut})
    verdict = judge(pair(base, cand))
    assert verdict.state == "INVALID" and verdict.exit_code == 4
    assert "7/1319 (0.53 %)" in verdict.headline and "--max-tokens" in verdict.advice[0]
    assert judge(pair(base, cand), policy=Policy(allow_truncated=True)).state == "PASS"
    fewer = dict.fromkeys(range(1267, 1273), "truncated")  # 6 = 0.45 %
    base, cand = arms(*TABLE, base={"statuses": fewer}, cand={"statuses": fewer})
    assert judge(pair(base, cand)).state == "PASS"


def test_t04_a_regression_that_the_budget_cannot_explain_still_fails() -> None:
    base, cand = arms(1000, 267, 9, 43, cand={"statuses": dict.fromkeys(range(1000, 1010), "truncated")})
    verdict = judge(pair(base, cand))
    assert verdict.state == "FAIL" and [r.code for r in verdict.reasons] == ["regression", "truncated"]
    base, cand = arms(1000, 267, 9, 43, cand={"statuses": dict.fromkeys(range(1000, 1260), "truncated")})
    verdict = judge(pair(base, cand))
    assert verdict.state == "INVALID" and "The baseline fits the same budget" in verdict.headline


def test_t05_cap_hits_are_reported_and_tested_in_pairs() -> None:
    """Accuracy overall, among completed, cap-hit share per arm, and a paired test on the cap hits."""
    base, cand = arms(900, 60, 20, 20, cand={"statuses": dict.fromkeys(range(900, 950), "truncated")})
    verdict = judge(pair(base, cand), policy=Policy(allow_truncated=True, margin=5))
    a = verdict.analysis
    assert a is not None
    assert (a.truncated.baseline, a.truncated.candidate, a.truncated.only_candidate) == (0, 50, 50)
    assert a.truncated.p_paired < 1e-10
    assert a.completed == PairedCounts(900, 10, 20, 20)
    assert (a.candidate.right_completed, a.candidate.completed) == (920, 950)
    report = build(judged((900, 60, 20, 20), None, cand={"statuses": dict.fromkeys(range(900, 950), "truncated")}))
    shown = terminal.render(report, width=160)
    assert "among completed" in shown and "920/950" in shown and "0 / 50 / 0" in shown


def test_t05_cap_hits_that_differ_are_a_change() -> None:
    cut = dict.fromkeys(range(20), "truncated")  # all right, yet cut
    base, cand = arms(1260, 5, 5, 49, cand={"statuses": cut})
    verdict = judge(pair(base, cand), policy=Policy(allow_truncated=True))
    assert verdict.state == "CHANGED" and [r.code for r in verdict.reasons] == ["truncated_differ"]


def test_t07_empties_are_named_when_they_are_the_drop() -> None:
    """flashinfer#4340: 1267 against 1249 of 1314; 20 against 36 empties; among the rest hardly a difference."""
    # 20 items empty in both, 16 more empty only in the candidate (right in the baseline)
    table = (1243, 24, 6, 41)
    both = dict.fromkeys(range(1294, 1314), "empty")
    more = dict.fromkeys(range(1243, 1259), "empty")
    base, cand = arms(*table, base={"statuses": both}, cand={"statuses": both | more})
    verdict = judge(pair(base, cand))
    a = verdict.analysis
    assert a is not None and (a.table.baseline_right, a.table.candidate_right) == (1267, 1249)
    assert verdict.state == "FAIL"
    assert (a.empty.baseline, a.empty.candidate) == (20, 36)
    assert a.empty.p_paired == pytest.approx(2 * 0.5**16)
    assert a.empty.p_fisher == pytest.approx(fisher_exact([[20, 1294], [36, 1278]]).pvalue)
    said = " ".join(verdict.warnings)
    assert "Most of the drop is empty answers: 36 against 20" in said
    assert "1294" not in said or "1278 items" in said
    assert "36/1314 (2.74 %) of the candidate's answers are empty" in said
    assert "Empty answers differ between the arms" in said


def test_t07_empties_that_differ_without_a_drop_are_a_change() -> None:
    empty = dict.fromkeys(range(1276, 1290), "empty")  # wrong anyway
    base, cand = arms(1265, 5, 6, 43, cand={"statuses": empty})
    verdict = judge(pair(base, cand))
    assert verdict.state == "CHANGED" and "Empty answers differ" in verdict.headline


def test_t07_pairing_decides_flashinfer_4340() -> None:
    """The same totals: unpaired Fisher p = .10; exact paired p = .0007/.0077/.028/.044 for 30/50/80/100 discordant."""
    assert fisher_exact([[1267, 47], [1249, 65]]).pvalue == pytest.approx(0.10, abs=0.01)
    for discordant, p in ((30, 0.0007), (50, 0.0077), (80, 0.028), (100, 0.044)):
        b = (discordant + 18) // 2
        assert mcnemar_exact(b, discordant - b) == pytest.approx(p, abs=6e-4)


def test_t16_numeric_noise_is_a_regression_on_this_protocol_with_a_flip_list() -> None:
    """SGLang #39797: −1.3 points need repeats; flips are listed, the A/A floor printed, the words say what was tested.
    """
    once = judge(pair(*arms(702, 20, 12, 26)))
    assert once.state == "INCONCLUSIVE" and "items" in " ".join(once.advice)
    assert len(list(pair(*arms(702, 20, 12, 26)).flips())) == 32
    # six independent repeats of the same rates settle it
    base, cand = zip(*[arms(702, 20, 12, 26) for _ in range(6)], strict=True)
    spread = [arm("candidate", [(i * 7 + k * 131) % 760 not in range(36) for i in range(760)]) for k in range(6)]
    steady = [arm("baseline", [(i * 11 + k * 57) % 760 not in range(24) for i in range(760)]) for k in range(6)]
    repeated = judge(pair(steady, spread))
    assert repeated.analysis is not None and repeated.analysis.clustered.pairs == 6 * 760
    assert repeated.state == "FAIL" and "Regression shown on this protocol" in repeated.headline
    # copies are no repeats: the same run six times stays as open as one
    assert judge(pair(base, cand)).state == "INCONCLUSIVE"


def test_t17_margin_below_the_floor_is_inconclusive() -> None:
    """ROCm/aiter #3715: identical inputs straddle the gate; then the gate is not what decides."""
    table = (1200, 40, 64, 15)
    base, _ = arms(*table)
    floor = Floor.measured(pair(base, second_run(*table, 100, 79)))
    verdict = judge(pair(*arms(*table)), floor=floor)
    assert verdict.state == "INCONCLUSIVE" and verdict.exit_code == 3
    assert "lies below the A/A noise of 1.67 pt" in verdict.headline
    assert "Attainable margin" in verdict.advice[0]


def test_t18_small_n_is_refused_with_the_number_needed() -> None:
    """GPQA's 198 items cannot carry a 1-point claim."""
    verdict = judge(pair(*arms(164, 4, 4, 26)), policy=Policy(margin=1))
    assert verdict.state == "INCONCLUSIVE" and "cannot show 1 pt even if every answer agrees" in verdict.headline
    needed = math.ceil((norm.isf(0.05) + norm.isf(0.2)) ** 2 * (8 / 198) / 0.01**2)
    assert f"For 1 pt: {needed} items, {needed - 198} more than now." in verdict.advice


def test_t24_shorter_answers_at_equal_accuracy_are_changed() -> None:
    """flashinfer#3589: coherent, benchmarks pass, 16k → 4.5k tokens."""
    long = [16_000 + 37 * (i % 200) for i in range(1319)]
    short = [4_500 + 11 * (i % 200) for i in range(1319)]
    base, cand = arms(1262, 3, 3, 51, base={"tokens": long}, cand={"tokens": short})
    verdict = judge(pair(base, cand))
    assert verdict.state == "CHANGED" and verdict.exit_code == 5
    ratio = length_ratio(long, short)
    assert f"{ratio.estimate:.3f} of the baseline's" in verdict.headline
    # inside MLPerf's 0.9–1.1 nothing happens, and outside without certainty only a warning
    near = [round(x * 0.95) for x in long]
    assert judge(pair(*arms(1262, 3, 3, 51, base={"tokens": long}, cand={"tokens": near}))).state == "PASS"
    wild = [x * (3 if i % 60 == 0 else 1) + (20_000 if i % 13 == 0 else 0) for i, x in enumerate(long[:260])]
    few = judge(pair(*arms(255, 0, 0, 5, base={"tokens": long[:260]}, cand={"tokens": wild})))
    assert few.state == "PASS" and any("not clearly inside" in w for w in few.warnings)


def test_t27_left_over_errors_are_inconclusive_with_both_bounds() -> None:
    base, cand = arms(1255, 8, 8, 48, cand={"statuses": dict.fromkeys(range(12), "error")})
    verdict = judge(pair(base, cand))
    assert verdict.state == "INCONCLUSIVE" and verdict.analysis is not None
    assert verdict.analysis.worst.difference == pytest.approx(-12 / 1319)
    assert verdict.analysis.best.difference == 0.0
    assert "12 items ended in errors and are neither right nor wrong" in verdict.headline
    assert "−0.91 pt" in verdict.headline and "--resume" in verdict.advice[0]


def test_t36_pairing_is_the_only_mode() -> None:
    """lm-eval #3831: unpaired z p = .08 where the paired test has .008: same data, other question."""
    table = PairedCounts(700, 60, 34, 206)
    pa, pb, n = table.baseline_right / table.n, table.candidate_right / table.n, table.n
    unpaired = norm.sf((pa - pb) / ((pa * (1 - pa) + pb * (1 - pb)) / n) ** 0.5)
    assert unpaired > 0.05 > 0.01 > mcnemar_midp(table.b, table.c)
    verdict = judge(pair(*arms(700, 60, 34, 206)))
    assert verdict.state == "FAIL" and verdict.analysis is not None
    assert verdict.analysis.p_worse == mcnemar_midp(60, 34)


def test_t37_no_discordant_items_is_identical_not_a_crash() -> None:
    verdict = judge(pair(*arms(1268, 0, 0, 51)))
    assert verdict.state == "PASS" and verdict.analysis is not None
    assert verdict.analysis.p_worse == verdict.analysis.p_worse_exact == 1.0
    assert verdict.analysis.ni.lower == pytest.approx(-0.00205, abs=1e-5)
    assert tango_interval(0, 0, 1319)[0] < 0 < tango_interval(0, 0, 1319)[1]


def test_t39_recovery_comes_with_its_interval() -> None:
    """llm-compressor #3001: "recovery 1.0006" is noise; the interval says so."""
    ratio = recovery(PairedCounts(1245, 12, 13, 49))
    assert ratio.estimate == pytest.approx(1.0008, abs=1e-4) and ratio.low < 0.995 and ratio.high > 1.005
    report = build(judged((1245, 12, 13, 49), None))
    assert "recovery 1.001 (95 % 0.993–1.009)" in markdown.render(report)
    assert "1.001 (95 % 0.993–1.009)" in terminal.render(report)


def test_t41_items_both_arms_miss_are_listed() -> None:
    outcomes = pair(*arms(1250, 17, 9, 43))
    assert len(outcomes.both_wrong()) == 43
    assert len(build(judged(TABLE))["comparisons"][0]["both_wrong"]) == 43


def test_t43_an_improvement_passes() -> None:
    """np.isclose fails on improvement; here it is reported and passes, also with many flips."""
    table = (1210, 9, 60, 40)
    base, _ = arms(*table)
    floor = Floor.measured(pair(base, second_run(*table, 6, 5)))
    verdict = judge(pair(*arms(*table)), floor=floor)
    assert verdict.state == "PASS" and "improvement shown" in verdict.headline
    # but answers lost beyond the floor are named even then
    table = (1160, 60, 99, 0)
    base, _ = arms(*table)
    floor = Floor.measured(pair(base, second_run(*table, 6, 5)))
    assert judge(pair(*arms(*table)), floor=floor).state == "CHANGED"


def test_t44_counts_not_three_decimals() -> None:
    """ ".841 against .841" hides 1268 against 1262; every report shows counts, flips and the interval."""
    report = build(judged((1249, 19, 13, 38)))
    for text in (markdown.render(report), terminal.render(report, width=160)):
        assert "1268/1319" in text and "1262/1319" in text
        assert "19 worse / 13 better" in text and "−0.45 pt" in text and "−1.20" in text
        assert "94.95–97.05" in text and "94.44–96.65" in text
