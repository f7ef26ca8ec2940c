"""Writes every report file of a run folder and renders one format on request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.errors import UsageError
from evals.report import github, html, junit, markdown, model, terminal
from evals.report.notable import all_flips

if TYPE_CHECKING:
    from evals.run_judge import Judged

FORMATS = ("terminal", "md", "junit", "html", "json", "github")


def write(report: Mapping[str, Any], folder: Path, judged: Judged | None = None) -> None:
    """Write report.json, report.md, report.html, junit.xml and flips.jsonl into `folder`, each replaced whole.

    flips.jsonl has every flip when `judged` is given, else those the report keeps. Inside GitHub Actions the step
    summary gets the Markdown block too.
    """
    files = {
        "report.json": model.dumps(report),
        "report.md": markdown.render(report),
        "report.html": html.render(report),
        "junit.xml": junit.render(report),
        "flips.jsonl": "".join(_flip_lines(report) if judged is None else all_flip_lines(judged)),
    }
    for name, text in files.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)
    github.write_summary(report)


def _line(candidate: str, flip: Mapping[str, Any]) -> str:
    return json.dumps({"arm": candidate} | dict(flip), ensure_ascii=False, sort_keys=True) + "\n"


def _flip_lines(report: Mapping[str, Any]) -> Iterator[str]:
    for comparison in report["comparisons"]:
        for item in comparison["notable"]:
            if item["kind"] in ("worse", "better"):
                yield _line(comparison["name"], item)


def all_flip_lines(judged: Judged) -> Iterator[str]:
    """flips.jsonl: one JSON object per flip; `arm` is the candidate's name."""
    for comparison in judged.comparisons:
        for flip in all_flips(comparison.outcomes, judged.floor):
            yield _line(comparison.name, flip)


def render(report: Mapping[str, Any], form: str, *, color: bool = False, width: int = 100) -> str:
    """A report in one of FORMATS."""
    if form == "terminal":
        return terminal.render(report, color=color, width=width)
    if form == "json":
        return model.dumps(report)
    renderers = {"md": markdown.render, "junit": junit.render, "html": html.render, "github": github.render}
    if form not in renderers:
        raise UsageError(f"unknown report format '{form}'; known: {', '.join(FORMATS)}")
    return renderers[form](report)
