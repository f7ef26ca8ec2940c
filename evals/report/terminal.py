"""report.json as tables for a terminal (rich); plain text when colour is off."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from evals.report import common
from evals.wording import percent, points

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STYLE = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "INCONCLUSIVE": "bold yellow",
    "INVALID": "bold magenta",
    "CHANGED": "bold cyan",
    "pass": "green",
    "fail": "red",
    "inconclusive": "yellow",
    "invalid": "magenta",
    "changed": "cyan",
    "skipped": "dim",
}


def render(report: common.Report, *, color: bool = False, width: int = 100) -> str:
    """The report as text of the given width, with ANSI colours if asked."""
    buffer = io.StringIO()
    console = Console(
        file=buffer, force_terminal=color, width=width, no_color=not color, highlight=False, legacy_windows=False
    )
    show(report, console)
    return buffer.getvalue()


def printable(value: Any) -> Any:
    """A report without control characters: server names and messages must not drive the reader's terminal."""
    if isinstance(value, str):
        return _CONTROL.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {k: printable(v) for k, v in value.items()}
    return [printable(v) for v in value] if isinstance(value, list) else value


def show(report: common.Report, console: Console) -> None:
    """Print the report to a rich console."""
    report = printable(report)
    for comparison in report["comparisons"]:
        _comparison(report, comparison, console)
    if len(report["comparisons"]) > 1:
        console.print(Text.assemble("Run: ", (report["state"], STYLE[report["state"]]), f" · {report['headline']}"))
    console.print(Text(_footer(report), style="dim"))


def _comparison(report: common.Report, comparison: Mapping[str, Any], console: Console) -> None:
    state = comparison["state"]
    title = Text.assemble((f" {state} ", STYLE[state]), f"· {common.STATE_MEANING[state]} ")
    body = Text(comparison["headline"])
    for reason in comparison["reasons"][1:]:
        body.append(f"\n{reason['message']}")
    for line in comparison["advice"]:
        body.append(f"\n→ {line}", style="bold")
    for line in comparison["warnings"]:
        body.append(f"\n! {line}", style="yellow")
    if comparison["stopped"]:
        body.append(f"\n■ {comparison['stopped'].get('message', 'stopped early')}")
    console.print(
        Panel(
            body,
            title=title,
            title_align="left",
            border_style=STYLE[state],
            subtitle=Text(f"{report['task']} · {comparison['baseline_variant']} → {comparison['variant']}"),
            subtitle_align="left",
        )
    )
    console.print(_arms(report, comparison))
    numbers = comparison["numbers"]
    if numbers is not None:
        console.print(Text(common.difference_words(numbers, report["margin"])))
        console.print(
            Text(
                f"95 % two-sided {common.interval(*numbers['tango'])} (Tango), "
                f"{common.interval(*numbers['newcombe'])} (Newcombe) · {common.regression_words(numbers)}"
            )
        )
        console.print(Text(f"flips {common.flips_words(numbers)} · {common.floor_words(report)}"))
        needs = numbers["needs"]
        console.print(
            Text(
                f"attainable margin {needs['attainable'] * 100:.2f} pt (80 % power, {percent(needs['discordance'], 1)} "
                f"discordance); {report['margin']:g} pt takes {needs['items']} items"
            )
        )
    console.print(_gates(comparison))


def _arms(report: common.Report, comparison: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    names = ["baseline", comparison["name"]]
    if any(a["name"] == "baseline_repeat" for a in report["arms"]):
        names.insert(1, "baseline_repeat")
    entries = [common.arm(report, name) for name in names]
    for name, entry in zip(names, entries, strict=True):
        table.add_column(f"{name.replace('_', ' ')}\n{entry['variant']}", overflow="fold")
    for label, score in (("correct (ours)", "ours"), ("lm-eval strict", "strict"), ("lm-eval flexible", "flexible")):
        table.add_row(label, *[common.score_cell(e["scores"][score]) for e in entries])
    table.add_row("among completed", *[common.score_cell(e["completed"]) for e in entries])
    table.add_row(
        "empty / truncated / errors",
        *[f"{s['empty']} / {s['truncated']} / {s['error']}" for s in (e["statuses"] for e in entries)],
    )
    tokens = [e["mean_completion_tokens"] for e in entries]
    table.add_row("mean completion tokens", *["–" if t is None else f"{t:.1f}" for t in tokens])
    numbers = comparison["numbers"]
    if numbers is not None:
        blank = [""] * (len(entries) - 1)
        table.add_row("length ratio", *blank, common.ratio_cell(numbers["length"]))
        table.add_row("recovery", *blank, common.ratio_cell(numbers["recovery"]))
        table.add_row("difference", *blank, f"{points(numbers['difference'])} pt")
    return table


def _gates(comparison: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for gate in comparison["gates"]:
        mark = Text(f"{common.GATE_MARK[gate['state']]} {gate['state']}", style=STYLE[gate["state"]])
        table.add_row(mark, gate["name"], Text(gate["summary"]))
    return table


def _footer(report: common.Report) -> str:
    data = report["data"]
    source = data.get("label") or data.get("path") or "data"
    return (
        f"{report['protocol']['items']} items · protocol {common.short(report['protocol_sha256'])} · {source} "
        f"{common.short(report['protocol'].get('dataset_sha256'))} · {report['command']}"
    )
