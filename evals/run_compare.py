"""`evals compare`: two arms of one or two run folders, refused as INVALID when their protocols differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evals import integrity as checks
from evals.data import restore
from evals.errors import UsageError
from evals.journal import read
from evals.protocol import describe, factor_for, undeclared
from evals.records import ArmResult, Finding
from evals.run_folder import RunFolder
from evals.run_judge import Judged, assemble, server_findings
from evals.run_options import BASELINE, CANDIDATE, REPEAT
from evals.run_score import Rows, rows_of, score_run


def compare_runs(a: str, b: str, margin: float | None, factors: Sequence[str]) -> Judged:
    """The baseline arm of run A against the baseline arm of run B (`PATH:ARM` chooses another arm).

    Different protocols give an INVALID verdict that names every undeclared difference.
    """
    (left, left_arm), (right, right_arm) = _arm_of(a), _arm_of(b)
    one, two = left.protocol(), right.protocol()
    arms = [replace(x, name=BASELINE) for x in _runs(left, left_arm)]
    aa = _runs(left, REPEAT) if left_arm == BASELINE else []
    others = [replace(x, name=CANDIDATE) for x in _runs(right, right_arm)]
    common = set(arms[0].items) & set(others[0].items)
    declared = tuple(factors)
    findings = [
        Finding(f"protocol-{name}", "invalid",
                f"the runs follow different protocols: {describe(name, x, y)}; "
                f"make them equal, or declare it with --factor {factor_for(name)}")
        for name, (x, y) in undeclared(one, two, declared).items()
    ]
    meta = replace(
        left.meta(), arms={BASELINE: arms[0].variant, CANDIDATE: others[0].variant}, factors=declared,
        margin=left.meta().margin if margin is None else margin, command=f"evals compare {a} {b}", timing={},
    )
    for side, name, new in ((left, left_arm, BASELINE), (right, right_arm, CANDIDATE)):
        rows = rows_of(read(side.journal))
        own = arms if new == BASELINE else others
        renamed: Rows = {(new, r): items for (arm, r), items in rows.items() if arm == name}
        shadow = RunFolder(side.path)
        shadow.data = {"arms": {new: side.arm(name)}}
        findings += server_findings(shadow, own, renamed, side.protocol(), meta)
    if common:
        findings += checks.check_pair(arms[0], others[0], declared)
        if one.shots_sha256 == two.shots_sha256 and one.template_sha256 == two.template_sha256:
            findings += checks.check_prompt_tokens(arms[0], others[0], declared)
    else:
        raise UsageError("the two runs have no item in common: were they run on the same data set?")
    return assemble(meta, one, restore(left.problems), [*arms, *aa, *others], findings)


def _arm_of(named: str) -> tuple[RunFolder, str]:
    """A run folder and the arm meant: `RUN`, or `RUN:ARM` (RUN:candidate:2 works)."""
    if Path(named).exists() or ":" not in named:
        return RunFolder.open(Path(named)), BASELINE
    text, _, arm = named.partition(":")
    folder = RunFolder.open(Path(text))
    if arm not in folder.data["arms"]:
        raise UsageError(f"{text} has no arm '{arm}'; its arms: {', '.join(folder.data['arms'])}")
    return folder, arm


def _runs(folder: RunFolder, arm: str) -> list[ArmResult]:
    found = score_run(folder, [arm]) if arm in folder.data["arms"] else []
    if not found and arm != REPEAT:
        raise UsageError(f"{folder.path} holds no answers for '{arm}' yet; go on with --resume")
    return found
