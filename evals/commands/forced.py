"""`evals run routing` and `evals run logprobs`: the same texts through two servers, token by token."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from evals.errors import UsageError


def task_options(options: argparse.Namespace) -> Any:
    """`RunOptions` for the task whose items a layer uses, its run folder named after the layer."""
    from evals.commands.run import to_run_options

    layer = options.task
    if options.baseline_file or options.candidate_file:
        raise UsageError(f"{layer}: variant files take part in generated-text tasks; start the server and give its URL")
    task = options.items or ("gsm8k-mini" if options.model == "mini" else "gsm8k")
    out = options.out or Path("runs") / f"{layer}-{time.strftime('%Y%m%d-%H%M%S')}"
    return to_run_options(argparse.Namespace(**(vars(options) | {"task": task, "out": out})))


def state(forced: Any, layer: str) -> int:
    """Exit code of one candidate and layer: 0, 3 (too little), 4 (integrity), 5 (moved)."""
    from evals.forced.run import ENOUGH_TOKENS

    evidence = forced.routing() if layer == "routing" else forced.logprobs()
    if any(f.severity == "invalid" for f in forced.findings):
        return 4
    if evidence is None:
        raise UsageError(
            f"'{forced.label}' or the baseline does not return routing (`return_routing`); only this project's service "
            "does: use `evals run logprobs` for other servers"
        ) if forced.failure is None else UsageError(forced.failure)
    if evidence.moved:
        return 5
    return 3 if forced.tokens < ENOUGH_TOKENS else 0


def main(options: argparse.Namespace) -> int:
    """Measure, print, write JSON and HTML into the run folder; the worst candidate's exit code."""
    from evals.forced import render
    from evals.forced.run import Extent, measure

    layer = options.task
    if options.resume:
        raise UsageError(f"{layer} keeps no journal; run it again without --resume")
    made = task_options(options)
    made.out.mkdir(parents=True, exist_ok=True)
    target = made.out / f"{layer}.json"
    if target.exists():
        raise UsageError(f"{made.out} already holds a {layer} run; choose another --out")

    def say(text: str) -> None:
        if made.progress:
            print(text, file=sys.stderr, flush=True)

    results = measure(made, Extent(options.long, options.long_tokens), made.out, say)
    codes = [state(f, layer) for f in results]
    report = {
        "schema": 1, "layer": layer, "task": made.task, "model": made.model, "baseline": made.arms[0].label,
        "command": made.command, "limits": vars(results[0].limits),
        "candidates": [render.as_json(f, layer, c) for f, c in zip(results, codes, strict=True)],
    }
    target.write_text(json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    title = f"{layer}: {made.arms[0].label} → {', '.join(f.label for f in results)}"
    page = render.html_page(title, [(f, layer, c) for f, c in zip(results, codes, strict=True)])
    (made.out / f"{layer}.html").write_text(page, encoding="utf-8")
    if "json" in (options.format or ()):
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        for forced, code in zip(results, codes, strict=True):
            _print(forced, layer, code)
        print(f"written: {target}, {target.with_suffix('.html')}")
    return next(c for c in (4, 5, 3, 0) if c in codes)


def _print(forced: Any, layer: str, code: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from evals.forced import render

    console = Console(width=None if sys.stdout.isatty() else 120)
    for title, head, rows in render.tables(forced, layer):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for number, name in enumerate(head):
            table.add_column(name, justify="left" if not number or name == "text" else "right", overflow="fold")
        for row in rows:
            table.add_row(*[Text(cell) for cell in row])
        console.print(table)
    for finding in forced.findings:
        console.print(Text(f"{finding.severity}: {finding.message}"))
    evidence = forced.routing() if layer == "routing" else forced.logprobs()
    word = {0: "PASS", 3: "INCONCLUSIVE", 4: "INVALID", 5: "CHANGED"}[code]
    console.print(Text(f"{word} · {layer} · {forced.label}: {evidence.detail if evidence else forced.failure}"))
