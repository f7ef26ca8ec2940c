"""The rule: each line of the table in docs/statistics.md, its precedence, gates, early stops and several candidates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evals.errors import UsageError
from evals.floor import Floor
from evals.pairing import pair
from evals.policy import Policy
from evals.records import Finding, Integrity
from evals.statistics import plan_looks
from evals.verdict import EXIT_CODES, LayerEvidence, Verdict, interim, judge, judge_all, overall
from tests.evals.arms import arm, arms, second_run

TABLE = (1250, 17, 9, 43)


def measured(table: tuple[int, int, int, int], lost: int, gained: int) -> Floor:
    base, _ = arms(*table)
    return Floor.measured(pair(base, second_run(*table, lost, gained)))


def codes(verdict: Verdict) -> list[str]:
    return [r.code for r in verdict.reasons]


def gate(verdict: Verdict, name: str) -> str:
    return next(g.state for g in verdict.gates if g.name == name)


def test_exit_codes_are_the_contract() -> None:
    assert EXIT_CODES == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "INVALID": 4, "CHANGED": 5}


def test_pass() -> None:
    verdict = judge(pair(*arms(*TABLE)), floor=measured(TABLE, 13, 12))
    assert (verdict.state, verdict.exit_code, codes(verdict)) == ("PASS", 0, ["noninferior"])
    assert "1267/1319 → 1259/1319" in verdict.headline and "−0.61 pt" in verdict.headline
    assert "lower bound −1.30 pt > −1.5 pt" in verdict.headline
    assert not verdict.warnings
    assert {g.name: g.state for g in verdict.gates} == {
        "integrity": "pass",
        "kernel-attested": "skipped",
        "accuracy-non-inferiority": "pass",
        "regression": "pass",
        "flips": "pass",
        "length": "pass",
        "determinism": "pass",
    }


def test_fail() -> None:
    verdict = judge(pair(*arms(1220, 47, 9, 43)), floor=measured((1220, 47, 9, 43), 13, 12))
    assert (verdict.state, verdict.exit_code, codes(verdict)) == ("FAIL", 1, ["regression"])
    assert "47 worse and 9 better" in verdict.headline and "beyond the margin" in verdict.headline
    assert gate(verdict, "regression") == gate(verdict, "accuracy-non-inferiority") == "fail"


def test_significant_but_small_drop_passes_with_a_warning() -> None:
    """Non-inferior and yet a shown drop: within the margin the user accepted, so it passes, but is said."""
    verdict = judge(pair(*arms(1250, 12, 2, 55)))
    assert verdict.analysis is not None and verdict.analysis.p_worse < 0.05 and verdict.analysis.ni.shown
    assert verdict.state == "PASS" and "A drop is shown" in verdict.warnings[0]
    assert not any("drop" in w for w in judge(pair(*arms(1250, 12, 2, 55)), policy=Policy(min_drop=0.5)).warnings)


def test_shown_drop_of_unclear_size_fails() -> None:
    """Neither within the margin nor surely beyond it, but a regression all the same."""
    verdict = judge(pair(*arms(1240, 28, 10, 41)))
    assert verdict.analysis is not None and -0.015 < verdict.analysis.ni.upper < 0
    assert verdict.state == "FAIL" and "at least" in verdict.headline
    # below the smallest drop that counts it is open, unless the estimate itself lies beyond the margin
    assert judge(pair(*arms(1240, 28, 10, 41)), policy=Policy(min_drop=1.0)).state == "INCONCLUSIVE"
    assert judge(pair(*arms(1235, 33, 10, 41)), policy=Policy(min_drop=1.2)).state == "FAIL"


def test_inconclusive_says_how_many_more() -> None:
    verdict = judge(pair(*arms(180, 5, 3, 12)))
    assert (verdict.state, verdict.exit_code, codes(verdict)) == ("INCONCLUSIVE", 3, ["not_shown"])
    needed = math.floor(0.04 * ((1.6448536 + 0.8416212) / 0.015) ** 2) + 1
    assert f"{needed} items, {needed - 200} more than now" in " ".join(verdict.advice)
    assert "Attainable margin" in verdict.advice[0]


def test_too_few_items_for_any_claim() -> None:
    verdict = judge(pair(*arms(48, 0, 0, 2)))
    assert verdict.state == "INCONCLUSIVE" and "even if every answer agrees" in verdict.headline
    assert "more than 177 items" in verdict.headline


def test_identical_answers_pass() -> None:
    verdict = judge(pair(*arms(1268, 0, 0, 51)), floor=measured((1268, 0, 0, 51), 0, 0))
    assert verdict.state == "PASS" and "lower bound −0.20 pt" in verdict.headline


@pytest.mark.parametrize("severity", ["invalid", "inconclusive", "warning", "note"])
def test_findings_by_severity(severity: str) -> None:
    finding = Finding("kernel-not-resolved", severity, "layer 3 ran another kernel", "candidate")  # type: ignore[arg-type]
    verdict = judge(pair(*arms(*TABLE)), integrity=Integrity((finding,), {"baseline": "attested"}))
    expected = {"invalid": "INVALID", "inconclusive": "INCONCLUSIVE", "warning": "PASS", "note": "PASS"}[severity]
    assert verdict.state == expected
    assert (finding.message in verdict.warnings) == (severity == "warning")
    if severity == "invalid":
        assert gate(verdict, "integrity") == "invalid" and verdict.headline == finding.message


def test_findings_about_another_candidate_do_not_count() -> None:
    finding = Finding("fallbacks", "invalid", "fell back", "candidate:2")
    assert judge(pair(*arms(*TABLE)), integrity=Integrity((finding,))).state == "PASS"


def test_invalid_beats_everything() -> None:
    finding = Finding("fingerprint-changed", "invalid", "changed during the run")
    base, cand = arms(1000, 267, 9, 43, cand={"statuses": {0: "error"}})
    assert judge(pair(base, cand), integrity=Integrity((finding,))).state == "INVALID"


def test_different_prompts_are_invalid_unless_declared() -> None:
    base, _ = arms(*TABLE)
    _, cand = arms(*TABLE, cand={"prompt": "other shots"})
    verdict = judge(pair(base, cand))
    assert (verdict.state, codes(verdict)) == ("INVALID", ["prompts_differ"])
    assert "1319 of 1319" in verdict.headline
    assert judge(pair(base, cand), policy=Policy(factors=("shots",))).state == "PASS"


def test_baseline_too_low_supports_nothing() -> None:
    for table in ((10, 3, 2, 1304), (150, 5, 5, 1159), (150, 100, 0, 1069)):
        verdict = judge(pair(*arms(*table)))
        assert (verdict.state, codes(verdict)) == ("INCONCLUSIVE", ["baseline_too_low"])
        assert "a baseline this low cannot support a claim" in verdict.headline
    assert judge(pair(*arms(300, 2, 2, 1015))).state == "PASS"
    assert judge(pair(*arms(300, 2, 2, 1015)), policy=Policy(margin=10)).state == "INCONCLUSIVE"


def test_margin_below_the_floor_is_inconclusive() -> None:
    """A/A discordance 14 %: noise 1.69 pt, more than the margin, even though this once NI came out."""
    table = (1200, 40, 64, 15)
    floor = measured(table, 100, 79)
    verdict = judge(pair(*arms(*table)), floor=floor)
    assert verdict.analysis is not None and verdict.analysis.ni.shown
    assert (verdict.state, codes(verdict)) == ("INCONCLUSIVE", ["margin_below_floor"])
    assert "179/1319" in verdict.headline and "Attainable margin" in verdict.advice[0]
    assert judge(pair(*arms(*table)), floor=floor, policy=Policy(margin=3)).state == "PASS"


def test_a_regression_is_shown_over_a_noisy_floor_too() -> None:
    table = (1100, 150, 40, 29)
    verdict = judge(pair(*arms(*table)), floor=measured(table, 100, 60))
    assert verdict.state == "FAIL"


def test_a_drifting_baseline_is_inconclusive() -> None:
    verdict = judge(pair(*arms(*TABLE)), floor=measured(TABLE, 40, 5))
    assert (verdict.state, codes(verdict)) == ("INCONCLUSIVE", ["baseline_drifts"])
    assert gate(verdict, "determinism") == "inconclusive"


def test_flips_beyond_the_floor_are_changed() -> None:
    """Equal accuracy, but 60 symmetric flips against 6."""
    table = (1220, 30, 30, 39)
    verdict = judge(pair(*arms(*table)), floor=measured(table, 3, 3), policy=Policy(margin=2))
    assert (verdict.state, verdict.exit_code, codes(verdict)) == ("CHANGED", 5, ["flips"])
    assert "60 flips against the candidate, 6 between two runs" in verdict.headline
    assert gate(verdict, "flips") == "changed"
    # as many flips as the baseline has by itself are no change
    assert judge(pair(*arms(*table)), floor=measured(table, 29, 28), policy=Policy(margin=2)).state == "PASS"


def test_stored_floor_and_no_floor() -> None:
    table = (1220, 30, 30, 39)
    stored = Floor.from_dict({"n": 1319, "b": 3, "c": 3, "texts_differ": None})
    verdict = judge(pair(*arms(*table)), floor=stored, policy=Policy(margin=2))
    assert verdict.state == "CHANGED" and "stored floor" in verdict.headline
    verdict = judge(pair(*arms(*table)), policy=Policy(margin=2))
    assert verdict.state == "PASS" and "No A/A run" in verdict.warnings[0]
    assert gate(verdict, "flips") == "skipped"
    assert Floor.from_dict(stored.as_dict()).discordance == stored.discordance


def test_length_outside_the_rule_is_changed() -> None:
    rng = np.random.default_rng(1)
    base_tokens = [int(x) for x in rng.integers(80, 220, 1319)]
    shorter = [int(x * 0.8) for x in base_tokens]
    base, cand = arms(*TABLE, base={"tokens": base_tokens}, cand={"tokens": shorter})
    verdict = judge(pair(base, cand))
    assert (verdict.state, codes(verdict)) == ("CHANGED", ["length"])
    assert "0.79" in verdict.headline or "0.80" in verdict.headline
    assert gate(verdict, "length") == "changed"
    base, cand = arms(*TABLE, base={"tokens": None}, cand={"tokens": None})
    assert gate(judge(pair(base, cand)), "length") == "skipped"


def test_layers_plug_in() -> None:
    evidence = [
        LayerEvidence("routing", True, "other expert set for 32 % of tokens in layer 5"),
        LayerEvidence("logprobs", False, "mean KL 0.0003"),
    ]
    verdict = judge(pair(*arms(*TABLE)), evidence=evidence)
    assert (verdict.state, codes(verdict)) == ("CHANGED", ["layer:routing"])
    assert "routing" in verdict.headline
    assert gate(verdict, "layer-routing") == "changed" and gate(verdict, "layer-logprobs") == "pass"
    failed = judge(pair(*arms(1200, 67, 9, 43)), evidence=evidence)
    assert failed.state == "FAIL" and any("routing" in w for w in failed.warnings)


def test_nothing_answered() -> None:
    base, cand = arms(3, 0, 0, 0, cand={"statuses": dict.fromkeys(range(3), "error")})
    verdict = judge(pair(base, cand))
    assert (verdict.state, codes(verdict), verdict.analysis) == ("INCONCLUSIVE", ["no_answers"], None)
    assert gate(verdict, "regression") == "skipped"


def test_missing_items_are_inconclusive() -> None:
    base, _ = arms(*TABLE)
    _, cand = arms(1200, 17, 9, 43)
    verdict = judge(pair(base, cand))
    assert verdict.state == "INCONCLUSIVE" and "items_missing" in codes(verdict)


def test_attestation_gate() -> None:
    both = Integrity((), {"baseline": "attested", "candidate": "attested"})
    assert gate(judge(pair(*arms(*TABLE)), integrity=both), "kernel-attested") == "pass"
    one = Integrity((), {"baseline": "attested", "candidate": "unattested"})
    assert gate(judge(pair(*arms(*TABLE)), integrity=one), "kernel-attested") == "skipped"


def test_several_candidates_are_holm_adjusted() -> None:
    """p = 0.037 alone is a regression; as the best of three it is not."""
    weak = pair(*arms(1240, 38, 24, 17))
    assert 0.03 < judge(weak).analysis.p_worse < 0.05  # type: ignore[union-attr]
    assert judge(weak).state == "FAIL"
    fine = pair(*arms(1262, 5, 6, 46))
    verdicts = judge_all([weak, fine, fine])
    assert [v.state for v in verdicts] == ["INCONCLUSIVE", "PASS", "PASS"]
    assert verdicts[0].p_adjusted == pytest.approx(3 * verdicts[0].analysis.p_worse)  # type: ignore[union-attr]
    gross = pair(*arms(1100, 167, 9, 43))
    verdicts = judge_all([gross, fine])
    assert [v.state for v in verdicts] == ["FAIL", "PASS"] and overall(verdicts) == "FAIL"
    assert "Holm-adjusted" in verdicts[0].headline
    assert overall(judge_all([fine, weak])) in ("INCONCLUSIVE", "FAIL")
    assert judge_all([fine])[0].p_adjusted is None


def test_early_stops() -> None:
    looks = plan_looks(1319)
    # a gross failure stops at the first look
    stop = interim(pair(*arms(250, 60, 5, 15)), looks)
    assert stop is not None and stop.kind == "regression" and stop.look.index == 1 and "330 of 1319" in stop.message
    # success: identical answers leave z²/(n + z²) = 3.5 pt at the first look, 0.9 pt at the second
    assert interim(pair(*arms(320, 0, 0, 10)), looks) is None
    stop = interim(pair(*arms(640, 0, 0, 20)), looks)
    assert stop is not None and stop.kind == "noninferior" and stop.look.index == 2
    assert interim(pair(*arms(640, 0, 0, 20)), looks, stop_for_success=False) is None
    # curtailed: with 20 of 1,319 items left neither claim can change
    late = plan_looks(1319)
    late = type(late)((1299, 1319), (2.5, 1.65), 0.05)
    stop = interim(pair(*arms(1250, 0, 25, 24)), late, stop_for_success=False)
    assert stop is not None and stop.kind == "curtailed" and "remaining 20 items" in stop.message
    # not a planned look, the last look, errors left: go on
    assert interim(pair(*arms(300, 0, 0, 20)), looks) is None
    assert interim(pair(*arms(1300, 0, 0, 19)), looks) is None
    base, cand = arms(250, 60, 5, 15, cand={"statuses": {0: "error"}})
    assert interim(pair(base, cand), looks) is None


def test_early_stop_verdict_uses_the_looks_level() -> None:
    outcomes = pair(*arms(250, 60, 5, 15))
    stop = interim(outcomes, plan_looks(1319))
    assert stop is not None
    verdict = judge(outcomes, look=stop.look)
    assert verdict.state == "FAIL" and verdict.analysis is not None
    assert verdict.analysis.z == pytest.approx(3.465, abs=1e-3) and verdict.analysis.level < 0.0003


def test_policy_refuses_nonsense() -> None:
    for bad, match in (({"margin": 0}, "points"), ({"alpha": 0.7}, "alpha"), ({"min_drop": -1}, "negative")):
        with pytest.raises(UsageError, match=match):
            Policy(**bad)


def test_repeats_that_copy_do_not_pass_what_one_run_does_not() -> None:
    base, cand = arms(180, 5, 3, 12)
    once, thrice = judge(pair(base, cand)), judge(pair([base] * 8, [cand] * 8))
    assert once.state == thrice.state == "INCONCLUSIVE"
    assert thrice.analysis is not None and once.analysis is not None
    assert thrice.analysis.ni.lower == pytest.approx(once.analysis.ni.lower, abs=1e-9)


def test_false_alarms_of_the_whole_rule() -> None:
    """150 A/A comparisons with item-dependent noise (about 4 % discordance): FAIL at most as often as alpha allows,
    CHANGED hardly ever."""
    rng = np.random.default_rng(21)
    n, runs = 300, 150
    p = np.where(rng.random(n) < 0.12, rng.random(n), 0.995)
    states: list[str] = []
    for _ in range(runs):
        a1, a2, b = (list(rng.random(n) < p) for _ in range(3))
        base = arm("baseline", a1)
        floor = Floor.measured(pair(base, arm("baseline_repeat", a2)))
        states.append(judge(pair(base, arm("candidate", b)), floor=floor, policy=Policy(margin=5)).state)
    assert states.count("FAIL") / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert states.count("CHANGED") / runs <= 0.03
    assert states.count("INVALID") == 0
