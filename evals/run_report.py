"""Writes a judged run's reports and prints the formats asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from evals.errors import UsageError
from evals.run_judge import Judged

FORMATS = ("terminal", "md", "json", "junit", "html", "github")


def check_formats(names: Sequence[str] | None) -> tuple[str, ...]:
    """Validate `--format`; the default is the terminal table."""
    for name in names or ():
        if name not in FORMATS:
            raise UsageError(f"unknown --format '{name}'; known: {', '.join(FORMATS)}")
    return tuple(names or ("terminal",))


def publish(judged: Judged, folder: Path | None, formats: Sequence[str], out: TextIO) -> int:
    """Write the report files into `folder` (if any), print the formats; returns the verdict's exit code."""
    from evals import report
    from evals.report import model

    made = model.build(judged)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        report.write(made, folder, judged)
    for name in formats:
        text = report.render(made, name)
        print(text, file=out, end="" if text.endswith("\n") else "\n")
    return judged.exit_code
