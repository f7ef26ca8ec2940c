"""Renderings of report.json: terminal, Markdown, JUnit, HTML, GitHub annotations."""

from evals.report.write import FORMATS, render, write

__all__ = ["FORMATS", "render", "write"]
