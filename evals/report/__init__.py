"""Renderings of report.json."""
