"""Writes a judged run's reports and prints the formats asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from evals import report
from evals.errors import UsageError
from evals.report import model
from evals.run_judge import Judged


def check_formats(names: Sequence[str] | None) -> tuple[str, ...]:
    """Validate `--format`; the default is the terminal table."""
    for name in names or ():
        if name not in report.FORMATS:
            raise UsageError(f"unknown --format '{name}'; known: {', '.join(report.FORMATS)}")
    return tuple(names or ("terminal",))


def publish(judged: Judged, folder: Path | None, formats: Sequence[str], out: TextIO) -> int:
    """Write the report files into `folder` (if any), print the formats; returns the verdict's exit code.

    Inside GitHub Actions the annotations are printed too.
    """
    made = model.build(judged)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        report.write(made, folder, judged)
    wanted = [*formats]
    if os.environ.get("GITHUB_ACTIONS") == "true" and "github" not in wanted:
        wanted.append("github")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for name in wanted:
        text = report.render(made, name, color=out.isatty(), width=width)
        if text:
            print(text, file=out, end="" if text.endswith("\n") else "\n", flush=True)
    return judged.exit_code
