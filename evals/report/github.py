"""report.json for GitHub Actions: annotations on stdout and the job's step summary."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from evals.report import common, markdown

LEVEL = {"PASS": "notice", "FAIL": "error", "INCONCLUSIVE": "warning", "INVALID": "error", "CHANGED": "warning"}


def _data(text: str) -> str:
    """Escape the message of a workflow command; a newline in it would start a new command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def render(report: common.Report) -> str:
    """One workflow command per candidate (`::error`, `::warning`, `::notice`) and one per warning."""
    lines = []
    for comparison in report["comparisons"]:
        title = f"{comparison['state']} {comparison['baseline_variant']} -> {comparison['variant']}"
        level = LEVEL[comparison["state"]]
        lines.append(f"::{level} title={_property(title)}::{_data(comparison['headline'])}")
        lines += [f"::warning title={_property(comparison['variant'])}::{_data(w)}" for w in comparison["warnings"]]
    return "\n".join(lines) + "\n"


def write_summary(report: common.Report, environment: Mapping[str, str] | None = None) -> Path | None:
    """Append the Markdown block to the file `$GITHUB_STEP_SUMMARY` names; None outside GitHub Actions."""
    target = (os.environ if environment is None else environment).get("GITHUB_STEP_SUMMARY")
    if not target:
        return None
    path = Path(target)
    with path.open("a", encoding="utf-8") as file:
        file.write(markdown.render(report) + "\n")
    return path
