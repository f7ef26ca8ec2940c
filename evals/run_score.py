"""Turns journal rows into scored records: lm-eval's two filters unchanged, our extractor beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evals import extraction, tasks
from evals.data import Problems, restore
from evals.journal import read
from evals.protocol import Sampling
from evals.records import ArmResult, ItemResult
from evals.run_collect import ALONE
from evals.run_folder import RunFolder

Rows = dict[tuple[str, int], dict[str, dict[str, Any]]]  # (arm, repeat) -> item -> row


def rows_of(lines: Iterable[dict[str, Any]]) -> Rows:
    """Journal rows by arm and repeat."""
    out: Rows = {}
    for line in lines:
        out.setdefault((line["arm"], line["repeat"]), {})[line["item"]] = line
    return out


def item_results(
    problems: Problems,
    rows: Mapping[str, Mapping[str, Any]],
    strict: Mapping[str, bool] | None = None,
    flexible: Mapping[str, bool] | None = None,
) -> dict[str, ItemResult]:
    """Scored items in protocol order; without lm-eval's scores (interim looks) those are None."""
    out: dict[str, ItemResult] = {}
    for item in problems.items:
        line = rows.get(item.id)
        if line is None:
            continue
        scored = line["status"] != "error"
        # reasoning that never ends holds no answer, whatever numbers are in it
        readable = scored and line["status"] != "truncated_in_reasoning"
        right, found = extraction.score(line["text"], item.answer) if readable else (False, None)
        out[item.id] = ItemResult(
            item=item.id, doc_id=item.doc_id, question=item.question, gold=item.answer,
            prompt_sha256=line["prompt_sha256"], status=line["status"], text=line["text"],
            finish_reason=line["finish_reason"], prompt_tokens=line["prompt_tokens"],
            completion_tokens=line["completion_tokens"], seconds=line["seconds"],
            strict=strict.get(item.id) if scored and strict is not None else None,
            flexible=flexible.get(item.id) if scored and flexible is not None else None,
            ours=right if scored else None, difficulty=item.difficulty, logprobs=line.get("logprobs"),
            matched_stop=line["matched_stop"], error=line["error"], tokens=line.get("tokens"),
            gaps=line.get("gaps"), extracted=found,
        )
    return out


def score_arm(
    folder: RunFolder, problems: Problems, name: str, repeat: int, rows: Mapping[str, Mapping[str, Any]]
) -> ArmResult:
    """One arm in one repeat, scored through lm-eval and by us."""
    from evals import lm  # seconds to import

    entry = folder.arm(name)
    present = replace(problems, items=tuple(i for i in problems.items if i.id in rows))
    strict: Mapping[str, bool] = {}
    flexible: Mapping[str, bool] = {}
    if present.items:
        texts = {item: str(line["text"]) for item, line in rows.items()}
        spec = tasks.get(folder.data["meta"]["task"])
        scores = lm.score(spec, present, Sampling(**folder.data["sampling"]), texts)
        strict, flexible = scores.strict, scores.flexible
    return ArmResult(
        name=name, variant=entry.get("label", name),
        fingerprint_before=entry.get("fingerprint_before"), fingerprint_after=entry.get("fingerprint_after"),
        items=item_results(present, rows, strict, flexible), repeat=repeat,
    )


def score_run(folder: RunFolder, names: Sequence[str] | None = None) -> list[ArmResult]:
    """Every arm of a run (or those named), baseline first, repeats in order, scored from the journal."""
    problems = restore(folder.problems)
    rows = rows_of(read(folder.journal))
    wanted = list(folder.data["arms"]) if names is None else list(names)
    found = []
    for name in wanted:
        for repeat in sorted(r for arm, r in rows if arm == name and not arm.endswith(ALONE)):
            found.append(score_arm(folder, problems, name, repeat, rows[name, repeat]))
    return found


def batch_invariance(rows: Rows, arm: str) -> tuple[int, int] | None:
    """(same text, asked) for items asked alone and inside batches; None when none were asked alone."""
    alone, together = rows.get((arm + ALONE, 0), {}), rows.get((arm, 0), {})
    pairs = [(alone[i]["text"], together[i]["text"]) for i in alone
             if i in together and "error" not in (alone[i]["status"], together[i]["status"])]
    return (sum(x == y for x, y in pairs), len(pairs)) if pairs else None
