"""Whole runs against mock servers: what is asked, what is scored, and the state that comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals import data, lm, run, tasks
from evals.errors import JournalError, PreflightError, ProtocolError, ServerError, UsageError
from evals.journal import read
from evals.protocol import Sampling
from evals.records import ArmResult
from evals.run_collect import ALONE
from evals.run_compare import compare_runs
from evals.run_folder import RunFolder
from evals.run_judge import Judged, judge_run
from evals.run_options import RunOptions
from evals.run_score import rows_of, score_run
from tests.evals.mock_server import Mock

Serve = Callable[..., tuple[Mock, str]]
Options = Callable[..., RunOptions]


def codes(judged: Judged) -> list[str]:
    return [f.code for f in judged.integrity.findings if f.severity == "invalid"]


def arm(judged: Judged, name: str) -> ArmResult:
    return next(a for a in judged.arms if a.name == name)


def test_equal_servers_run_to_a_verdict(serve: Serve, options: Options) -> None:
    (a, url_a), (b, url_b) = serve(variant="fp8/a", wrong=0.1), serve(variant="fp8/b")
    path = run.execute(options(url_a, url_b, aa=True, limit=60))
    judged = judge_run(path)
    baseline, candidate = arm(judged, "baseline"), arm(judged, "candidate")
    assert len(baseline.items) == len(candidate.items) == 60
    # what the mock got wrong on purpose is what is scored wrong, by all three scores
    for result in baseline.items.values():
        right = a.answer(result.question) == a.gold[result.question]
        assert result.ours is result.strict is result.flexible is right
    assert judged.comparisons[0].outcomes.counts.c == sum(not r.ours for r in baseline.items.values()) > 0
    assert judged.floor is not None and judged.floor.flips == 0
    assert b.posts == 60 + 4 and a.posts == 2 * 60 + 4
    assert judged.integrity.attestation == {"baseline": "attested", "candidate": "attested"}
    assert codes(judged) == [] and judged.exit_code in (0, 3, 5)


def test_lm_evals_numbers_are_unchanged(serve: Serve, options: Options, data_dir: Path) -> None:
    """The per-item scores add up to what stock `simple_evaluate` prints for the same answers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    _, url = serve(variant="fp8/a", wrong=0.3)
    made = options(url, url)
    results = score_run(RunFolder.open(run.execute(made)), ["baseline"])[0]
    spec = tasks.get("gsm8k")
    problems, _ = run.prepare(made)
    model = lm.AnsweringLM(lambda asks: [results.items[a.item].text for a in asks], spec, made.sampling)
    stock = lm_eval.simple_evaluate(
        model=model, tasks=[lm.task_config(spec, problems, made.sampling)], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks.TASK_DIR), include_defaults=False),
    )
    assert stock is not None
    numbers = stock["results"]["gsm8k"]
    for name, attribute in (("strict-match", "strict"), ("flexible-extract", "flexible")):
        ours = sum(getattr(r, attribute) for r in results.items.values()) / len(results.items)
        assert ours == pytest.approx(numbers[f"exact_match,{name}"])
    assert 0.3 < numbers["exact_match,strict-match"] < 1


def test_table_of_filters_as_lm_eval_scores_it() -> None:
    """evals.md §1.4: strict and flexible columns, through lm-eval itself."""
    from tests.evals.test_extraction import TABLE

    spec = tasks.get("gsm8k")
    items = tuple(
        data.Item(f"{n:016d}", n, f"question {n}", f"so\n#### {gold}") for n, (_, gold, *_) in enumerate(TABLE)
    )
    problems = data.Problems(items, (), "x", "table", len(items))
    scores = lm.score(spec, problems, Sampling(), {f"{n:016d}": text for n, (text, *_) in enumerate(TABLE)})
    seen = [(int(scores.strict[i.id]), int(scores.flexible[i.id])) for i in items]
    assert seen == [(strict, flexible) for _, _, strict, flexible, _ in TABLE]


def test_prompts_are_lm_evals_with_the_first_train_rows(data_dir: Path) -> None:
    spec = tasks.get("gsm8k")
    problems = data.select(spec.load(data_dir, None), shots=2, limit=3, seed=5)
    for ask, item in zip(lm.render(spec, problems, Sampling()), problems.items, strict=True):
        shots = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in problems.shots)
        assert ask.prompt == f"{shots}Question: {item.question}\nAnswer:" and ask.item == item.id
    chat = lm.render(spec, problems, Sampling(endpoint="chat", system="Think."))
    messages = json.loads(chat[0].prompt)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert messages[-1]["content"] == f"Question: {problems.items[0].question}\nAnswer:"
    assert messages[2]["content"] == problems.shots[0]["answer"]


def test_a_task_with_other_stops_is_refused(data_dir: Path) -> None:
    spec = tasks.get("gsm8k")
    model = lm.AnsweringLM(lambda asks: [""], spec, Sampling(max_tokens=5))

    class Request:
        args = ("p", {"until": ["x"], "max_gen_toks": 5, "temperature": 0.0})
        doc = {"item": "i", "doc_id": 0}

    with pytest.raises(ProtocolError, match="until"):
        model.generate_until([Request()])


def test_chat_endpoint_runs(serve: Serve, options: Options) -> None:
    (a, url_a), (_, url_b) = serve(reasoning=True), serve(reasoning=True)
    kwargs = {"endpoint": "chat", "chat_template_kwargs": {"enable_thinking": False}, "logprobs": True}
    judged = judge_run(run.execute(options(url_a, url_b, sampling=kwargs)))
    assert all(r.ours and r.strict and r.logprobs for r in arm(judged, "candidate").items.values())
    body = json.loads(a.bodies[0])
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["messages"][-1]["role"] == "user"


def test_repeats_change_only_the_seed(serve: Serve, options: Options) -> None:
    (a, url_a), (_, url_b) = serve(), serve()
    judged = judge_run(run.execute(options(url_a, url_b, repeats=3, limit=10, smoke=0)))
    assert [(x.name, x.repeat) for x in judged.arms] == [
        ("baseline", 0), ("baseline", 1), ("baseline", 2), ("candidate", 0), ("candidate", 1), ("candidate", 2)]
    seeds = sorted(json.loads(b)["seed"] for b in a.bodies)
    assert seeds == [1234] * 10 + [1235] * 10 + [1236] * 10
    assert judged.comparisons[0].outcomes.repeats == 3


def test_several_candidates(serve: Serve, options: Options) -> None:
    urls = [serve(variant=f"fp8/{n}", wrong=w)[1] for n, w in (("a", 0.0), ("b", 0.0), ("c", 0.6))]
    judged = judge_run(run.execute(options(*urls, limit=60, aa=True)))
    states = {c.name: c.verdict.state for c in judged.comparisons}
    assert states["candidate:2"] == "FAIL" and states["candidate"] != "FAIL" and judged.exit_code == 1


def test_a_gross_break_stops_after_fifty_items(serve: Serve, options: Options) -> None:
    (_, url_a), (bad, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("wrong@*",))
    path = run.execute(options(url_a, url_b, limit=200))
    judged = judge_run(path)
    assert bad.posts == 50 + 4 and judged.exit_code == 1
    assert judged.comparisons[0].stopped["kind"] == "gross" and judged.comparisons[0].outcomes.pairs == 50
    run.execute(options(url_a, url_b, limit=200, resume=True))
    assert bad.posts == 54  # nothing left to ask


def test_looks_stop_early_for_success(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b")
    judged = judge_run(run.execute(options(url_a, url_b, limit=200, looks=4, margin=6.0, smoke=0)))
    stopped = judged.comparisons[0].stopped
    assert stopped is not None and stopped["kind"] in ("noninferior", "curtailed") and b.posts == stopped["items"] < 200
    analysis = judged.comparisons[0].verdict.analysis
    assert analysis is not None and analysis.look is not None
    assert judged.exit_code == 0


def test_servers_that_are_useless_end_the_run_with_a_reason(serve: Serve, options: Options) -> None:
    _, good = serve()
    _, broken = serve(faults=("500@*",))
    with pytest.raises(ServerError, match=r"first 20 items of 'candidate' all failed: HTTP 500"):
        run.execute(options(good, broken, retries=0))
    _, empty = serve(faults=("empty@*",))
    with pytest.raises(PreflightError, match="answers of the baseline are all empty"):
        run.execute(options(empty, good, out=Path(options(good, good).out) / "2"))
    with pytest.raises(ServerError, match="does not answer"):
        run.execute(options("http://127.0.0.1:9", good, out=Path(options(good, good).out) / "3"))


def test_some_errors_left_are_inconclusive_and_resume_clears_them(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("500@20%",))
    made = options(url_a, url_b, limit=60, retries=0)
    judged = judge_run(run.execute(made))
    bad = [r for r in arm(judged, "candidate").items.values() if r.status == "error"]
    assert 3 < len(bad) < 25 and all(r.ours is r.strict is r.flexible is None for r in bad)
    verdict = judged.comparisons[0].verdict
    assert verdict.state == "INCONCLUSIVE" and judged.exit_code == 3
    assert verdict.analysis is not None and verdict.analysis.errors.unresolved == len(bad)
    b.faults = ()
    asked = b.posts
    judged = judge_run(run.execute(replace(made, resume=True)))
    assert b.posts - asked == len(bad)
    assert all(r.ours for r in arm(judged, "candidate").items.values())
    assert judged.comparisons[0].verdict.analysis.errors.unresolved == 0


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ({"resolved": "fp8/reference"}, "kernel-not-resolved"), ({"fallbacks": 2}, "fallbacks"),
        ({"change_after": 20}, "fingerprint-changed"), ({"versions": "7"}, "differs-versions"),
        ({"weights": "v" * 64}, "differs-weights"), ({"model": "other"}, "differs-model"),
        ({"extra_tokens": 1}, "prompt-tokens"),
    ],
)
def test_a_candidate_that_is_not_what_it_says_is_invalid(
    serve: Serve, options: Options, behaviour: dict[str, Any], code: str
) -> None:
    (_, url_a), (_, url_b) = serve(), serve(**behaviour)
    judged = judge_run(run.execute(options(url_a, url_b)))
    assert codes(judged) == [code] and judged.exit_code == 4


def test_unattested_servers_are_recorded_or_refused(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(fingerprint=False), serve(fingerprint=False)
    path = run.execute(options(url_a, url_b))
    judged = judge_run(path)
    assert judged.integrity.attestation == {"baseline": "unattested", "candidate": "unattested"}
    assert codes(judged) == [] and judged.exit_code != 4
    observed = RunFolder.open(path).data["arms"]["baseline"]["observed"]
    assert observed == {"model": "mock", "root": "mock", "max_model_len": 4096}
    strict = judge_run(run.execute(options(url_a, url_b, require_attestation=True, out=path.parent / "2")))
    assert codes(strict) == ["unattested", "unattested"] and strict.exit_code == 4


def test_preflight_refuses_what_does_not_fit(serve: Serve, options: Options) -> None:
    mock, url = serve(max_model_len=300)
    with pytest.raises(PreflightError, match=r"above the server's 300.*--max-tokens \d+ at most"):
        run.execute(options(url, url))
    mock.max_model_len = 20
    with pytest.raises(PreflightError, match=r"the server takes 20; use fewer --shots"):
        run.execute(options(url, url, resume=True))
    assert mock.posts == 0


def test_double_bos_is_refused(serve: Serve, options: Options) -> None:
    mock, url = serve(double_bos=True)
    with pytest.raises(PreflightError, match="begins twice with the same tokens"):
        run.execute(options(url, url))
    assert mock.posts == 0


def test_the_probe_sees_answers_that_depend_on_the_batch(serve: Serve, options: Options) -> None:
    (_, url_a), (b, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b", faults=("batch@1-4",))
    judged = judge_run(run.execute(options(url_a, url_b)))
    found = {f.code: f for f in judged.integrity.findings}
    assert "4 of 4 probed items gave the same text" in found["batch-invariance"].message
    assert "4 of 4 probed items changed when asked alone" in found["batch-dependent"].message
    assert b.posts == 34


def test_parallel_servers_give_the_same_rows(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a", wrong=0.2), serve(variant="fp8/b")
    one = run.execute(options(url_a, url_b, aa=True))
    two = run.execute(options(url_a, url_b, aa=True, parallel_servers=True, out=one.parent / "2"))

    def texts(path: Path) -> dict:
        return {(a, r, i): (x["text"], x["key"]) for (a, r), items in rows_of(read(path / "items.jsonl")).items()
                for i, x in items.items()}

    assert texts(one) == texts(two)
    assert {arm.split(ALONE)[0] for arm, _, _ in texts(one)} == {"baseline", "baseline_repeat", "candidate"}


def test_floor_of_another_run_is_reused_only_when_it_fits(serve: Serve, options: Options) -> None:
    (a, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b")
    first = run.execute(options(url_a, url_b, aa=True))
    before = a.posts
    second = run.execute(options(url_a, url_b, aa=True, floor=first, out=first.parent / "2"))
    assert a.posts - before == 34  # 30 items and the probe: no second pass
    judged = judge_run(second)
    assert judged.floor is not None and judged.floor.source == "stored" and judged.floor.n == 30
    with pytest.raises(UsageError, match="has another protocol"):
        run.execute(options(url_a, url_b, floor=first, limit=20, out=first.parent / "3"))
    a.weights = "v" * 64
    with pytest.raises(UsageError, match="measured on another server"):
        run.execute(options(url_a, url_b, floor=first, out=first.parent / "4"))
    none = run.execute(options(url_a, url_b, out=first.parent / "5"))
    with pytest.raises(UsageError, match="has no A/A run"):
        run.execute(options(url_a, url_b, floor=none, out=first.parent / "6"))


def test_twenty_shots_against_eight_is_invalid(serve: Serve, options: Options) -> None:
    """The comparison that came with the originating change: 20-shot against 8-shot numbers."""
    _, url = serve(max_model_len=100_000)
    twenty = run.execute(options(url, url, shots=20, out=options(url, url).out / "20"))
    eight = run.execute(options(url, url, shots=8, out=options(url, url).out / "8"))
    judged = compare_runs(str(twenty), str(eight), None, ())
    assert judged.exit_code == 4 and judged.state == "INVALID"
    assert codes(judged) == ["protocol-shots", "protocol-shots_sha256"]
    assert "shots 20 against 8" in judged.integrity.findings[0].message
    declared = compare_runs(str(twenty), str(eight), 20.0, ("shots",))
    assert codes(declared) == [] and declared.state != "INVALID"


def test_compare_arms_of_one_run_and_refuses_what_is_not_there(serve: Serve, options: Options) -> None:
    (_, url_a), (_, url_b) = serve(variant="fp8/a", wrong=0.3), serve(variant="fp8/b")
    path = run.execute(options(url_a, url_b))
    judged = compare_runs(str(path), f"{path}:candidate", 5.0, ())
    assert judged.comparisons[0].outcomes.counts.c > 0 and judged.meta.arms["candidate"] == url_b
    with pytest.raises(UsageError, match="has no arm 'x'; its arms: baseline, candidate"):
        compare_runs(str(path), f"{path}:x", None, ())
    with pytest.raises(UsageError, match="not a run folder"):
        compare_runs(str(path), "/nowhere", None, ())


def test_another_variant_cannot_go_on_with_a_journal(serve: Serve, options: Options) -> None:
    (a, url_a), (_, url_b) = serve(variant="fp8/a"), serve(variant="fp8/b")
    made = options(url_a, url_b, limit=10, smoke=0)
    path = run.execute(made)
    folder = RunFolder.open(path)
    folder.data["arms"]["baseline"]["done"] = False  # as after a kill
    folder.save()
    lines = (path / "items.jsonl").read_text().splitlines(keepends=True)
    (path / "items.jsonl").write_text("".join(lines[:5]))
    a.variant = "fp8/other"
    with pytest.raises(JournalError, match=r"another server for 'baseline' \(variant.requested"):
        run.execute(replace(made, resume=True))
    assert a.posts == 10


@pytest.mark.parametrize(
    ("change", "said"),
    [({"limit": 20}, "items 30 items against 20 items"), ({"margin": 2.0}, "margin"),
     ({"shots": 3}, "shots 2 against 3"), ({"sampling": {"max_tokens": 9}}, "max_tokens 256 against 9")],
)
def test_resume_with_other_options_is_refused(
    serve: Serve, options: Options, change: dict[str, Any], said: str
) -> None:
    _, url = serve()
    run.execute(options(url, url, smoke=0))
    with pytest.raises(ProtocolError, match=said):
        run.execute(options(url, url, smoke=0, resume=True, **change))
    with pytest.raises(UsageError, match="already holds a run"):
        run.execute(options(url, url, smoke=0))


def test_a_hopeless_baseline_is_named_even_where_cut_answers_come_first(serve: Serve, options: Options) -> None:
    """The small model on real GSM8K: near zero, and often without an end."""
    (_, url_a), (_, url_b) = (serve(variant=v, wrong=1.0, faults=("truncate@10%",)) for v in ("fp8/a", "fp8/b"))
    judged = judge_run(run.execute(options(url_a, url_b, limit=60)))
    verdict = judged.comparisons[0].verdict
    assert verdict.state == "INVALID" and verdict.reasons[0].code == "truncated"
    assert any("a baseline this low cannot support a claim" in w for w in verdict.warnings)
    again = options(url_a, url_b, limit=60, allow_truncated=True, out=options(url_a, url_b).out / "2")
    allowed = judge_run(run.execute(again))
    assert allowed.comparisons[0].verdict.reasons[0].code == "baseline_too_low" and allowed.exit_code == 3
