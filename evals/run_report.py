"""Writes a run's reports and prints the one asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from evals.run_judge import Judged, judge_run


def write_and_print(path: Path, formats: tuple[str, ...], out: TextIO) -> int:
    """Judge a run folder, write its report files, print the formats asked for; returns the exit code."""
    judged = judge_run(path)
    return show(judged, out)


def show(judged: Judged, out: TextIO) -> int:
    for comparison in judged.comparisons:
        v = comparison.verdict
        print(comparison.name, comparison.variant, v.state, v.headline, file=out)
        for r in v.reasons:
            print("  -", r.code, r.message, file=out)
        for w in v.warnings:
            print("  !", w, file=out)
    return judged.exit_code
