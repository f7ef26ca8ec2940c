"""evals.md §5, the cases about running: each of T01–T44 that this side answers, by its name.

Statistics and reports answer T16, T17, T18, T36, T37, T39, T41, T43, T44 (test_t_cases_stats). Elsewhere: T19's
server-side probe and T40 (messages in a completions prompt) are the service's; T35's loglikelihood half too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals import data, lm, protocol, run, tasks
from evals.errors import DataError, JournalError, PreflightError, ProtocolError
from evals.journal import Journal, read
from evals.protocol import Sampling
from evals.records import ArmResult, sha256_hex
from evals.report import model
from evals.run_collect import ALONE
from evals.run_compare import compare_runs
from evals.run_folder import RunFolder
from evals.run_judge import Judged, judge_run
from evals.run_options import RunOptions
from evals.run_score import item_results
from tests.evals.conftest import rows, write_jsonl
from tests.evals.mock_server import Mock

Serve = Callable[..., tuple[Mock, str]]
Options = Callable[..., RunOptions]


def arm(judged: Judged, name: str) -> ArmResult:
    return next(a for a in judged.arms if a.name == name)


def invalid(judged: Judged) -> list[str]:
    return [f.code for f in judged.integrity.findings if f.severity == "invalid"]


def reasons(judged: Judged) -> list[str]:
    return [r.code for r in judged.comparisons[0].verdict.reasons]


def said(judged: Judged) -> str:
    """Headline, reasons and warnings of the first comparison."""
    verdict = judged.comparisons[0].verdict
    return " ".join([verdict.headline, *(r.message for r in verdict.reasons), *verdict.warnings])


def go(options: RunOptions) -> Judged:
    return judge_run(run.execute(options))


def test_t01_one_variants_journal_never_answers_for_another(serve: Serve, options: Options) -> None:
    (a, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b")
    go(options(url_a, url_b, limit=12, smoke=0))
    assert (a.posts, b.posts) == (12, 12)  # the second variant was asked everything itself
    folder = RunFolder.open(options(url_a, url_b).out)
    with Journal(folder.journal) as journal:
        keys = {(r["arm"], r["item"]): r["key"] for r in journal}
        for item in {i for _, i in keys}:
            assert keys["baseline", item] != keys["candidate", item]
            with pytest.raises(JournalError, match="another variant"):
                journal.get("baseline", 0, item, keys["candidate", item])


def test_t02_a_budget_that_does_not_fit_is_refused_not_cut(serve: Serve, options: Options) -> None:
    mock, url = serve(max_model_len=256)
    with pytest.raises(PreflightError, match=r"Prompts are never cut: use --max-tokens \d+ at most"):
        run.execute(options(url, url))
    assert mock.posts == 0


@pytest.mark.parametrize("max_tokens", [256, 1024, 2046, 2047, 2048, 4096])
def test_t03_every_budget_sends_the_whole_prompt(data_dir: Path, max_tokens: int) -> None:
    spec = tasks.get("gsm8k")
    problems = data.select(spec.load(data_dir, None), shots=20, limit=2, seed=1)
    whole = lm.render(spec, problems, Sampling(max_tokens=17))
    assert lm.render(spec, problems, Sampling(max_tokens=max_tokens)) == whole
    assert whole[0].prompt.count("Question:") == 21 and len(whole[0].prompt) > 2048


def test_t04_cut_answers_make_the_protocol_unfit(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("truncate@10%",))
    judged = go(options(url_a, url_b, limit=60))
    cut = [r for r in arm(judged, "candidate").items.values() if r.status == "truncated"]
    assert cut and all(r.finish_reason == "length" for r in cut)
    assert judged.exit_code == 4 and reasons(judged) == ["truncated"]
    allowed = go(options(url_a, url_b, limit=60, allow_truncated=True, out=options(url_a, url_b).out / "2"))
    assert allowed.exit_code != 4


def test_t05_accuracy_overall_and_among_completed(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("truncate@30%",))
    judged = go(options(url_a, url_b, limit=60, allow_truncated=True))
    report = model.build(judged)
    side = next(a for a in report["arms"] if a["name"] == "candidate")
    cut = sum(r.status == "truncated" for r in arm(judged, "candidate").items.values())
    right = sum(bool(r.ours) for r in arm(judged, "candidate").items.values())
    done = [r for r in arm(judged, "candidate").items.values() if r.status == "completed"]
    counts = judged.comparisons[0].outcomes.arm_counts("candidate")
    assert (counts.truncated, counts.right, counts.completed) == (cut, right, len(done)) and cut > 5
    assert counts.right_completed == sum(bool(r.ours) for r in done) == len(done) > right - cut
    analysis = judged.comparisons[0].verdict.analysis
    assert analysis is not None and analysis.truncated.p < 0.01  # the paired test on cap-hits
    assert str(cut) in json.dumps(side)


def test_t06_reasoning_that_never_ends_holds_no_answer(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("think@20%",))
    judged = go(options(url_a, url_b, allow_truncated=True))
    thinking = [r for r in arm(judged, "candidate").items.values() if r.status == "truncated_in_reasoning"]
    assert thinking and all(r.ours is False and r.extracted is None and "4" in r.text for r in thinking)


def test_t07_empties_are_counted_and_named(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("empty@25%",))
    judged = go(options(url_a, url_b, limit=60))
    empty = sum(r.status == "empty" for r in arm(judged, "candidate").items.values())
    assert empty > 5 and judged.comparisons[0].outcomes.arm_counts("candidate").empty == empty
    assert f"{empty}/60" in said(judged) or f"{empty} of 60" in said(judged)
    assert "empty" in said(judged)


def test_t08_stops_end_only_at_a_new_question(serve: Serve, options: Options, gold: dict[str, str]) -> None:
    assert tasks.get("gsm8k").stops[0] == "\n\nQuestion:" and "Question:" not in tasks.get("gsm8k").stops
    mock, url = serve(variant="fp8/a")
    mock.gold = {q: f"Identify the Question: how many?\n{a}" for q, a in gold.items()}
    judged = go(options(url, url))
    results = arm(judged, "baseline").items.values()
    assert all(r.ours and r.text.startswith("Identify the Question:") for r in results)
    assert {r.matched_stop for r in results} == {"\n\nQuestion:"}


def test_t09_bodies_do_not_depend_on_concurrency(serve: Serve, options: Options) -> None:
    seen = []
    for concurrency in (1, 64):
        mock, url = serve()
        out = options(url, url).out / str(concurrency)
        made = options(url, url, sampling={"concurrency": concurrency}, smoke=0, out=out)
        run.execute(made)
        seen.append(sorted(set(mock.bodies)))
    assert seen[0] == seen[1] and len(seen[0]) == 30


def test_t10_numbers_are_compared_as_numbers_beside_lm_evals_strings(serve: Serve, options: Options) -> None:
    mock, url = serve()
    mock.gold = {q: a.rpartition("#### ")[0] + f"#### ${a.rpartition('#### ')[2]}.00" for q, a in mock.gold.items()}
    judged = go(options(url, url))
    results = arm(judged, "baseline").items.values()
    assert all(r.ours and not r.strict and not r.flexible for r in results)
    assert judged.protocol.extractor == "moe-parity-1"


def test_t11_shots_recited_first_do_not_count(data_dir: Path) -> None:
    spec = tasks.get("gsm8k")
    problems = data.select(spec.load(data_dir, None), shots=0, limit=4, seed=1)
    recital = "As in the example, 5.\n#### 5\nNow ours.\n#### "
    texts = {i.id: recital + i.answer.rpartition("#### ")[2] for i in problems.items}
    lines = {i: {"status": "completed", "text": t, "prompt_sha256": "", "finish_reason": "stop", "prompt_tokens": 1,
                 "completion_tokens": 1, "seconds": 0.0, "matched_stop": None, "error": None} for i, t in texts.items()}
    scores = lm.score(spec, problems, Sampling(), texts)
    assert all(r.ours for r in item_results(problems, lines).values()) and not any(scores.strict.values())


def test_t12_a_template_that_does_not_fit_is_flagged_and_the_prompt_shown(
    serve: Serve, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    mock, url = serve()
    mock.gold = {q: f"It is {a.rpartition('#### ')[2]}" for q, a in mock.gold.items()}
    judged = go(options(url, url, progress=True))
    shown = capsys.readouterr().err
    assert "completions, protocol" in shown and "max_tokens 256" in shown and "  | Answer:" in shown
    found = [f for f in judged.integrity.findings if f.code == "format"]
    assert {f.arm for f in found} == {"baseline", "candidate"} and "strict filter finds 0" in found[0].message


def test_t13_bos_missing_or_doubled_on_one_side_is_invalid(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(), serve(extra_tokens=1)
    assert invalid(go(options(url_a, url_b))) == ["prompt-tokens"]
    _, twice = serve(double_bos=True)
    with pytest.raises(PreflightError, match="begins twice"):
        run.execute(options(twice, twice, out=options(twice, twice).out / "2"))


@pytest.mark.parametrize("change", [{"shots": 3}, {"sampling": {"max_tokens": 64}}, {"sampling": {"seed": 5}}])
def test_t14_other_flags_are_another_protocol(serve: Serve, options: Options, change: dict[str, Any]) -> None:
    _, url = serve()
    one = run.execute(options(url, url, smoke=0, limit=60))
    two = run.execute(options(url, url, smoke=0, limit=60, out=one.parent / "2", **change))
    judged = compare_runs(str(one), str(two), None, ())
    assert judged.exit_code == 4 and all(c.startswith("protocol-") for c in invalid(judged)) and invalid(judged)
    assert judged.protocol.hash() == RunFolder.open(one).data["protocol_sha256"]


def test_t15_engine_versions_are_pinned_and_their_change_named(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(versions="1"), serve(versions="2")
    judged = go(options(url_a, url_b))
    assert invalid(judged) == ["differs-versions"] and "versions.moe_parity" in said(judged)
    assert go(options(url_a, url_b, factors=("versions",), out=options(url_a, url_b).out / "2")).exit_code != 4


def test_t19_determinism_comes_from_a_probe(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("batch@2-3",))
    found = {f.code: f for f in go(options(url_a, url_b)).integrity.findings}
    assert found["batch-invariance"].arm == "baseline"
    assert "2 of 4 probed items changed when asked alone" in found["batch-dependent"].message


def test_t20_kernel_asked_for_must_be_the_kernel_resolved(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(), serve(resolved="fp8/triton")
    judged = go(options(url_a, url_b))
    assert invalid(judged) == ["kernel-not-resolved"] and "layer 1 ran fp8/triton instead of fp8/mock" in said(judged)


def test_t21_settings_come_from_the_server_not_from_the_label(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(), serve()
    plain = b.card
    b.card = lambda: plain() | {"engine": {"kv_block": 16, "ep_size": 1}}  # type: ignore[method-assign]
    judged = go(options(url_a, url_b))
    assert invalid(judged) == ["differs-engine"] and "engine.ep_size" in said(judged)


def test_t22_smoke_stage_at_one_and_at_full_concurrency(serve: Serve, options: Options) -> None:
    (a, url_a), (_, url_b) = serve(delay=0.02), serve()
    path = run.execute(options(url_a, url_b))
    lines = read(path / "items.jsonl")
    alone = [r for r in lines if r["arm"] == "baseline" + ALONE]
    assert len(alone) == 4 and lines[:4] == alone  # before anything else, one at a time
    assert a.most_in_flight > 1
    _, broken = serve(faults=("nan@*",))
    with pytest.raises(Exception, match="NaN"):
        run.execute(options(broken, url_b, retries=0, out=path.parent / "2"))


def test_t23_valid_looking_garbage_stops_within_fifty_items(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("wrong@*",))
    judged = go(options(url_a, url_b, limit=200))
    assert b.posts <= 50 + 4 and judged.exit_code == 1


def test_t24_shorter_but_right_answers_are_changed_not_passed(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b")
    b.gold = {q: "#### " + a.rpartition("#### ")[2] for q, a in b.gold.items()}
    judged = go(options(url_a, url_b, limit=200, aa=True, smoke=0))
    assert judged.exit_code == 5 and "length" in reasons(judged)


def test_t25_speculative_decoding_on_one_side_needs_its_factor(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(), serve()
    plain = b.card
    b.card = lambda: plain() | {"engine": {"kv_block": 16, "speculative": "mtp:3"}}  # type: ignore[method-assign]
    judged = go(options(url_a, url_b))
    assert invalid(judged) == ["differs-spec"] and "--factor spec" in said(judged)
    assert go(options(url_a, url_b, factors=("spec",), out=options(url_a, url_b).out / "2")).exit_code != 4


def test_t26_gross_break_stops_early_and_points_to_the_log(
    serve: Serve, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    (_, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", wrong=0.68)  # 32 % right, as SGLang #25742
    judged = go(options(url_a, url_b, limit=200, progress=True))
    assert judged.exit_code == 1 and b.posts <= 50 + 4
    assert "stopped after 50 of 200 items: grossly worse" in capsys.readouterr().err


def test_t27_infrastructure_errors_are_never_right_or_wrong(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("503@20%",))
    judged = go(options(url_a, url_b, limit=60, retries=0))
    bad = [r for r in arm(judged, "candidate").items.values() if r.status == "error"]
    assert bad and all(r.ours is None and r.strict is None and r.flexible is None for r in bad)
    analysis = judged.comparisons[0].verdict.analysis
    assert analysis is not None and judged.exit_code == 3 and reasons(judged) == ["errors_left"]
    assert analysis.table.n == 60 - len(bad)
    assert (analysis.worst.table.b, analysis.worst.table.n) == (len(bad), 60)  # all wrong
    assert (analysis.best.table.b, analysis.best.table.n) == (0, 60)  # all right


def test_t28_a_repeated_request_keeps_its_id_and_gives_one_row(serve: Serve, options: Options) -> None:
    (a, url_a), (_, url_b) = serve(variant="fp8/a", faults=("hang@3", "half@7")), serve(variant="fp8/b")
    path = run.execute(options(url_a, url_b, smoke=0, timeout=0.5))
    assert a.posts == 32 and sorted(a.ids.values())[-2:] == [2, 2] and len(a.ids) == 30
    slots = [(r["arm"], r["repeat"], r["item"]) for r in map(json.loads, (path / "items.jsonl").open())]
    assert len(slots) == len(set(slots)) == 60


def test_t31_only_finished_answers_are_final(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("nofinish@20%",))
    made = options(url_a, url_b, retries=0, smoke=0)
    first = go(made)
    missing = [i for i, r in arm(first, "candidate").items.items() if r.status == "error"]
    b.faults, before = (), b.posts
    again = go(replace(made, resume=True))
    assert missing and b.posts - before == len(missing)
    assert all(r.status == "completed" for r in arm(again, "candidate").items.values())


def test_t32_items_are_paired_by_question_in_any_file_order(
    serve: Serve, options: Options, tmp_path: Path, data_dir: Path
) -> None:
    shuffled = data.read_jsonl(data_dir / "test.jsonl")
    random.Random(3).shuffle(shuffled)
    write_jsonl(tmp_path / "shuffled.jsonl", shuffled)
    _, url = serve(wrong=0.3)
    same: dict[str, Any] = {"shots": 0, "limit": 20, "smoke": 0}
    one = run.execute(options(url, url, **same))
    two = run.execute(options(url, url, **same, data=tmp_path / "shuffled.jsonl", out=tmp_path / "2"))
    judged = compare_runs(str(one), str(two), None, ("data",))
    x, y = arm(judged, "baseline").items, arm(judged, "candidate").items
    assert list(x) == list(y) and len(x) == 20
    assert all(x[i].question == y[i].question and x[i].prompt_sha256 == y[i].prompt_sha256 for i in x)
    assert any(x[i].doc_id != y[i].doc_id for i in x) and judged.comparisons[0].outcomes.counts.flips == 0


def test_t33_a_subset_asks_the_same_prompts(data_dir: Path) -> None:
    spec = tasks.get("gsm8k")
    raw = spec.load(data_dir, None)
    few, many = (
        {a.item: sha256_hex(a.prompt) for a in lm.render(spec, data.select(raw, shots=5, limit=n, seed=1), Sampling())}
        for n in (10, 60)
    )
    assert list(few) == list(many)[:10] and all(many[i] == few[i] for i in few)


def test_t34_shots_come_from_train_and_are_never_evaluated(tmp_path: Path, data_dir: Path) -> None:
    raw = data.load_gsm8k(data_dir, None)
    asked = {i.question for i in data.select(raw, shots=5, limit=None, seed=1).items}
    assert not asked & {s["question"] for s in data.select(raw, shots=5, limit=None, seed=1).shots}
    write_jsonl(tmp_path / "train.jsonl", rows(3) + rows(3, start=1000))
    write_jsonl(tmp_path / "test.jsonl", rows(10))
    with pytest.raises(DataError, match="shot 1 is also an evaluated problem"):
        data.select(data.load_gsm8k(tmp_path, None), shots=2, limit=None, seed=1)


def test_t38_a_frozen_transcript_is_scored_exactly(serve: Serve, options: Options) -> None:
    """Twenty frozen answers (evals.md §1.4) through the whole road: server, journal, lm-eval, our extractor."""
    from tests.evals.test_extraction import TABLE

    questions = {f"Frozen question {n}?": f"so\n#### {answer}" for n, (_, answer, *_) in enumerate(TABLE)}
    mock, url = serve()
    mock.gold = {q: text for q, (text, *_) in zip(questions, TABLE, strict=True)}
    file = options(url, url).out.parent / "frozen.jsonl"
    write_jsonl(file, [{"question": q, "answer": a} for q, a in questions.items()])
    judged = go(options(url, url, data=file, shots=0, limit=None, smoke=0))
    results = {r.question: r for r in arm(judged, "baseline").items.values()}
    assert len(results) == len(TABLE) == 20
    for question, (_, _, strict, flexible, ours) in zip(questions, TABLE, strict=True):
        found = results[question]
        assert (found.strict, found.flexible, found.ours) == (bool(strict), bool(flexible), bool(ours)), question


def test_t42_an_edited_data_file_is_another_protocol(serve: Serve, options: Options, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", rows(20))
    _, url = serve()
    made = options(url, url, data=file, shots=0, limit=None, smoke=0)
    run.execute(made)
    edited = rows(20)
    edited[3]["answer"] = "different\n#### 1"
    write_jsonl(file, edited)
    with pytest.raises(ProtocolError, match="dataset_sha256"):
        run.execute(replace(made, resume=True))
    spec = tasks.get("gsm8k")
    seen = lm.render(spec, data.select(spec.load(file, None), shots=0, limit=None, seed=1), Sampling())
    assert len(seen) == 20 and protocol.lm_eval_version()  # prompts are always rendered from the file as it is
