"""Writes every report file of a run folder and renders one format on request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.errors import UsageError
from evals.report import github, html, junit, markdown, model, terminal
from evals.report.notable import all_flips

if TYPE_CHECKING:
    from evals.run_judge import Judged

FORMATS = ("terminal", "md", "junit", "html", "json", "github")


def write_all(folder: Path, judged: Judged) -> dict[str, Any]:
    """Write report.json, report.md, report.html, junit.xml and flips.jsonl into `folder`; returns the report.

    Each file is replaced whole. Inside GitHub Actions the step summary gets the Markdown block too.
    """
    report = model.build(judged)
    files = {
        "report.json": model.dumps(report),
        "report.md": markdown.render(report),
        "report.html": html.render(report),
        "junit.xml": junit.render(report),
        "flips.jsonl": "".join(flip_lines(judged)),
    }
    for name, text in files.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)
    github.write_summary(report)
    return report


def flip_lines(judged: Judged) -> Iterator[str]:
    """flips.jsonl: one JSON object per flip, with the candidate's name."""
    for comparison in judged.comparisons:
        for flip in all_flips(comparison.outcomes, judged.floor):
            yield json.dumps({"candidate": comparison.name} | flip, ensure_ascii=False, sort_keys=True) + "\n"


def render(report: dict[str, Any], form: str, *, color: bool = False, width: int = 100) -> str:
    """A report in one of FORMATS."""
    if form == "terminal":
        return terminal.render(report, color=color, width=width)
    if form == "json":
        return model.dumps(report)
    renderers = {"md": markdown.render, "junit": junit.render, "html": html.render, "github": github.render}
    if form not in renderers:
        raise UsageError(f"unknown report format '{form}'; known: {', '.join(FORMATS)}")
    return renderers[form](report)
