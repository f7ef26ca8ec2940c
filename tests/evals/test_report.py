"""report.json and its text renderings: schema, determinism, escaping, counts, line limits, JUnit and annotations."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from evals import report as reports
from evals.errors import UsageError
from evals.records import ArmResult, Finding
from evals.report import github, junit, markdown, terminal
from evals.report.first_difference import first_difference
from evals.report.model import build, dumps, validate
from evals.rules import LayerEvidence
from evals.run_judge import Judged, assemble
from evals.verdict import judge
from tests.evals.arms import arms, item, second_run
from tests.evals.judging import FINGERPRINT, judged, meta, protocol

TABLE = (1249, 19, 13, 38)
NASTY = "`</pre><script>alert(1)</script> | @someone [x](javascript:1) ```\n## 9\n::error::x \x00\x1b[31m"


@pytest.fixture(scope="module")
def run() -> Judged:
    return judged(TABLE, base={"fingerprint": FINGERPRINT}, cand={"fingerprint": FINGERPRINT})


@pytest.fixture(scope="module")
def built(run: Judged) -> dict[str, Any]:
    return build(run)


def several() -> Judged:
    base, one = arms(*TABLE)
    _, two = arms(1100, 168, 13, 38)
    two = replace(two, name="candidate:2", variant="fp8/other")
    runs = [base, one, two, second_run(*TABLE, 13, 12)]
    return assemble(meta(), protocol(1319), None, runs, [])  # type: ignore[arg-type]


def test_report_follows_its_schema_and_holds_the_numbers(built: dict[str, Any]) -> None:
    validate(built)
    numbers = built["comparisons"][0]["numbers"]
    assert (built["state"], built["exit_code"], built["schema"]) == ("PASS", 0, 1)
    assert numbers["table"] == {"a": 1249, "b": 19, "c": 13, "d": 38, "n": 1319, "difference": -6 / 1319} or (
        numbers["table"]["difference"] == pytest.approx(-6 / 1319)
    )
    assert round(100 * numbers["lower"], 2) == -1.20 and round(numbers["p_worse"], 2) == 0.15
    assert built["floor"]["flips"] == 25 and built["floor"]["source"] == "measured"
    assert len(built["comparisons"][0]["notable"]) == 32
    assert built["protocol"]["items"] == 1319


def test_schema_refuses_strangers(built: dict[str, Any]) -> None:
    for broken in ({**built, "surprise": 1}, {**built, "state": "OK"}, {k: v for k, v in built.items() if k != "arms"}):
        with pytest.raises(jsonschema.ValidationError):
            validate(broken)


def test_no_wall_clock_outside_timing(run: Judged) -> None:
    """The same answers at other speeds and times give the same bytes, timing aside."""

    def slower(arm: ArmResult) -> ArmResult:
        return replace(arm, items={k: replace(v, seconds=v.seconds * 7 + 1) for k, v in arm.items.items()})

    base, cand = (slower(a) for a in run.arms[:2])
    again = slower(run.arms[2])
    other = assemble(meta(timing={"seconds": 99.0}), run.protocol, run.problems, [base, cand, again], [])
    one, two = build(run), build(other)
    assert dumps(one) != dumps(two) and dumps(one, timing=False) == dumps(two, timing=False)
    for name in ("md", "junit", "html", "terminal"):
        assert reports.render(one, name) == reports.render(two, name)
    assert json.loads(dumps(one)) == one


def test_every_state_builds_and_renders() -> None:
    cases = {
        "FAIL": judged((1100, 168, 13, 38)),
        "INCONCLUSIVE": judged((180, 5, 3, 12), None),
        "INVALID": judged(
            TABLE, findings=[Finding("fallbacks", "invalid", "'candidate' fell back 3 times", "candidate")]
        ),
        "CHANGED": judged(TABLE, base={"tokens": 200}, cand={"tokens": [100 + i % 3 for i in range(1319)]}),
        "PASS": judged((1268, 0, 0, 51), (0, 0)),
    }
    for state, run in cases.items():
        made = build(run)
        assert made["state"] == state
        for form in reports.FORMATS:
            text = reports.render(made, form)
            assert state in text, (state, form)
        assert markdown.render(made).count("\n") <= 40


def test_nothing_answered_still_reports() -> None:
    errors = dict.fromkeys(range(4), "error")
    made = build(judged((4, 0, 0, 0), None, cand={"statuses": errors}))
    assert made["state"] == "INCONCLUSIVE" and made["comparisons"][0]["numbers"] is None
    for form in reports.FORMATS:
        assert "INCONCLUSIVE" in reports.render(made, form)
    assert all(x["kind"] == "error" for x in made["comparisons"][0]["notable"])


def test_markdown_block(built: dict[str, Any]) -> None:
    text = markdown.render(built)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("### Accuracy check · glm4moe-mini · fp8/emulated → fp8/emulated · **PASS**")
    assert "| correct | 1268/1319 (96.13 %, 94.95–97.05) | 1262/1319 (95.68 %, 94.44–96.65) |" in lines
    assert "| empty / truncated / errors | 0 / 0 / 0 | 0 / 0 / 0 |" in lines
    assert "Δ −0.45 pt, 95.0 % one-sided lower −1.20 (Tango) > −1.50 ✔ · flips 19 worse / 13 better (2.4 %)" in text
    assert "A/A flips 25/1319" in text and "regression p = 0.148" in text
    assert "fp8/emulated on 5/5 layers, 0 fallbacks" in text and "torch 2.13.0" in text
    assert text.count("<details>") == text.count("</details>") == 1 and "32 flipped answers" in text
    assert "evals run gsm8k --model mini" in text


def nasty() -> Judged:
    base, cand = arms(1249, 19, 13, 38)
    texts = {
        k: replace(v, text=NASTY + str(v.ours), extracted="<b>9|`</b>", question=NASTY, gold="#### 4<i>")
        for k, v in cand.items.items()
    }
    return assemble(
        meta(model=NASTY, command="evals run '</script><script>' `x`"),
        protocol(1319),
        None,  # type: ignore[arg-type]
        [base, replace(cand, items=texts, variant="fp8/<x>|y")],
        [Finding("c", "warning", NASTY, "candidate")],
    )


def test_untrusted_text_stays_text() -> None:
    made = build(nasty())
    block = markdown.render(made)
    outside = re.sub(r"`[^`\n]*`", "", block)  # inside a code span HTML is inert
    assert "<script" not in outside and "<b>" not in outside and "@someone" not in outside
    assert outside.count("`") == 0 and block.count("\n") <= 40
    for line in block.splitlines():
        assert not line.startswith(("## 9", "::"))
    root = ET.fromstring(junit.render(made))  # well-formed in spite of NUL and ESC
    assert root.tag == "testsuites"
    commands = github.render(made).splitlines()
    assert all(c.startswith(("::error ", "::warning ", "::notice ")) for c in commands)
    assert not any(c.startswith("::error::x") for c in commands)
    assert "\x1b[31m" not in terminal.render(made)


def test_junit_has_a_case_per_gate(built: dict[str, Any]) -> None:
    suite = ET.fromstring(junit.render(built))[0]
    names = [c.attrib["name"] for c in suite.iter("testcase")]
    assert names == [
        "integrity",
        "kernel-attested",
        "accuracy-non-inferiority",
        "regression",
        "flips",
        "length",
        "determinism",
    ]
    assert suite.attrib["failures"] == suite.attrib["errors"] == "0"
    properties = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
    assert properties["baseline_weights_sha256"] == "4be1" * 16 and properties["state"] == "PASS"
    failed = ET.fromstring(junit.render(build(judged((1100, 168, 13, 38)))))[0]
    assert {c.attrib["name"] for c in failed.iter("testcase") if c.find("failure") is not None} >= {"regression"}
    open_ = ET.fromstring(junit.render(build(judged((180, 5, 3, 12), None))))[0]
    assert [c.attrib["name"] for c in open_.iter("testcase") if c.find("error") is not None] == [
        "accuracy-non-inferiority"
    ]
    assert int(open_.attrib["skipped"]) >= 2  # no A/A run: flips and determinism


def test_github_annotations_and_summary(tmp_path: Path) -> None:
    failed = build(judged((1100, 168, 13, 38)))
    assert github.render(failed).startswith("::error title=FAIL fp8/emulated -> fp8/emulated::Regression shown")
    target = tmp_path / "summary.md"
    assert github.write_summary(failed, {"GITHUB_STEP_SUMMARY": str(target)}) == target
    github.write_summary(failed, {"GITHUB_STEP_SUMMARY": str(target)})
    assert target.read_text().count("### Accuracy check") == 2  # appended, not replaced
    assert github.write_summary(failed, {}) is None


def test_several_candidates_share_one_block() -> None:
    made = build(several())
    assert made["state"] == "FAIL" and [c["state"] for c in made["comparisons"]] == ["PASS", "FAIL"]
    text = markdown.render(made)
    assert text.count("\n") <= 40 and "fp8/other" in text and "**FAIL**" in text and "**PASS**" in text
    assert "Holm-adjusted" in terminal.render(made, width=200)
    assert len(ET.fromstring(junit.render(made))) == 2


def test_layers_reach_every_report() -> None:
    run = judged(TABLE)
    evidence = [
        LayerEvidence(
            "routing",
            True,
            "other experts for 32 % of tokens",
            {"agreement": 0.68},
            "<svg xmlns='http://www.w3.org/2000/svg'/>",
        )
    ]
    first = run.comparisons[0]
    verdict = judge(first.outcomes, policy=run.policy, floor=run.floor, evidence=evidence)
    made = build(replace(run, comparisons=(replace(first, verdict=verdict),)))
    assert made["state"] == "CHANGED"
    for form in ("terminal", "md", "junit", "html", "json"):
        assert "routing" in reports.render(made, form)
    assert "data:image/svg+xml;base64," in reports.render(made, "html")


def test_files_of_a_run(tmp_path: Path, run: Judged, built: dict[str, Any]) -> None:
    reports.write(built, tmp_path, run)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "flips.jsonl",
        "junit.xml",
        "report.html",
        "report.json",
        "report.md",
    ]
    flips = [json.loads(line) for line in (tmp_path / "flips.jsonl").read_text().splitlines()]
    assert len(flips) == 32 and {f["kind"] for f in flips} == {"worse", "better"}
    assert flips[0]["arm"] == "candidate" and flips[0]["unstable"] in (True, False)
    validate(json.loads((tmp_path / "report.json").read_text()))
    with pytest.raises(UsageError, match="unknown report format"):
        reports.render(built, "pdf")


def test_flips_beyond_the_cap_are_in_the_file(tmp_path: Path) -> None:
    run = judged((900, 350, 20, 49), None)
    made = build(run)
    assert len(made["comparisons"][0]["notable"]) == 200 and made["comparisons"][0]["notable_omitted"] == 170
    reports.write(made, tmp_path, run)
    assert len((tmp_path / "flips.jsonl").read_text().splitlines()) == 370


def test_first_difference_by_token_with_gaps() -> None:
    x = item(0, True, text="a b c", tokens=None)
    assert first_difference(x, x) is None
    left = replace(x, text="2+2=4 so", tokens=["2", "+2", "=4", " so"], gaps=[1.0, 2.0, 0.01, None])
    right = replace(x, text="2+2=5 so", tokens=["2", "+2", "=5", " so"], gaps=[1.0, 2.0, 0.02, None])
    assert first_difference(left, right) == {
        "unit": "token",
        "index": 2,
        "start": 3,
        "baseline": "=4",
        "candidate": "=5",
        "gap_baseline": 0.01,
        "gap_candidate": 0.02,
    }


@pytest.mark.parametrize(
    ("left", "right", "unit", "start", "pieces"),
    [
        ("It is 42 apples", "It is 43 apples", "word", 6, ("42", "43")),
        ("same start", "same start and more", "word", 10, ("", " ")),
        ("", "text", "word", 0, ("", "text")),
        ("ein Ärger", "ein Übel", "word", 4, ("Ärger", "Übel")),
    ],
)
def test_first_difference_by_word(left: str, right: str, unit: str, start: int, pieces: tuple[str, str]) -> None:
    found = first_difference(item(0, True, text=left), item(0, True, text=right))
    assert found is not None
    assert (found["unit"], found["start"], (found["baseline"], found["candidate"])) == (unit, start, pieces)


def test_first_difference_survives_tokens_that_do_not_add_up() -> None:
    """Byte pieces of one character are replacement characters one by one."""
    left, right = (replace(item(0, True, text=t), tokens=["n", "\ufffd", "\ufffd"]) for t in ("né", "nè"))
    found = first_difference(left, right)
    assert found is not None and found["start"] == 1 and (found["baseline"], found["candidate"]) == ("é", "è")
