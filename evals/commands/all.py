"""`evals run all`: contract, kernel parity, routing, logprobs, accuracy, in order of cost, in one report."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals import layers
from evals.errors import Interrupted, UsageError
from evals.rules import LayerEvidence
from evals.run_options import ArmSpec, RunOptions

Say = Callable[[str], None]


def kernel_check(variant: str, model: str, target: Path) -> tuple[dict[str, Any] | None, str]:
    """`moe-kernels check` in a process of its own: (its JSON, or None, and why not)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "moe_kernels.cli", "check", variant, "--model", model, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1) and target.exists():
        return json.loads(target.read_text(encoding="utf-8")), ""
    return None, " ".join((done.stderr or done.stdout).split())[-300:]


def kernel_evidence(report: dict[str, Any]) -> tuple[list[LayerEvidence], str | None]:
    """Contract and kernel evidence of a check, and what makes going on useless (broken contract, NaN)."""
    found: list[LayerEvidence] = []
    gross = None
    findings = report["findings"]
    for layer, rows in (
        ("contract", [f for f in findings if f["probe"] == "contract"]),
        ("kernel", [f for f in findings if f["probe"] != "contract"]),
    ):
        bad = [f for f in rows if not f["ok"]]
        probes = sorted({f["probe"] for f in bad})
        detail = f"{len(rows)} probes pass" if not bad else (
            f"{len(bad)} of {len(rows)} probes fail ({', '.join(probes)}); {_place(bad[0])}: {bad[0]['detail']}"
        )
        worst = max((f["value"] for f in rows if f["probe"] == "parity" and isinstance(f["value"], float)), default=0.0)
        metrics: dict[str, float | int | str] = {"probes": len(rows), "failed": len(bad), "worst_calc_diff": worst}
        if bad and all(f.get("cause") == "routing" for f in bad):
            metrics["cause"] = "routing"
        found.append(LayerEvidence(layer, bool(bad), detail, metrics))
        infinite = [f for f in bad if f["probe"] == "parity" and not isinstance(f["value"], float | int)]
        if (layer == "contract" and bad) or infinite:
            gross = f"{layer}: {(infinite or bad)[0]['detail']}"
    return found, gross


def _place(finding: dict[str, Any]) -> str:
    return "whole model" if finding["layer"] < 0 else f"layer {finding['layer']}"


def _kernels(made: RunOptions, arm: ArmSpec, say: Say) -> tuple[list[LayerEvidence], str | None]:
    if arm.variant is None or made.server_cmd is not None:
        say(f"{arm.name}: contract and kernel parity need a variant of ours; not checked")
        return [], None
    say(f"{arm.name}: moe-kernels check {arm.variant}")
    target = made.out / "logs" / f"{arm.name.replace(':', '-')}-check.json"
    report, why = kernel_check(arm.variant, made.model or "", target)
    if report is None:
        say(f"{arm.name}: kernel check did not run: {why}")
        return [], None
    return kernel_evidence(report)


def main(options: argparse.Namespace) -> int:
    """Run the layers; a candidate that is grossly broken is not run any further."""
    from evals import run
    from evals.commands.forced import task_options
    from evals.run_report import check_formats

    formats = check_formats(options.format)
    made = task_options(options)
    made.check()
    if (made.out / "run.json").exists() and not made.resume:
        raise UsageError(f"{made.out} already holds a run; add --resume to go on with it, or choose another --out")

    def say(text: str) -> None:
        if made.progress:
            print(text, file=sys.stderr, flush=True)

    try:
        found, gross = _early_layers(made, options, say)
        left = tuple(a for a in made.arms if a.name not in gross)
        for name, why in gross.items():
            say(f"{name}: stopped before accuracy: {why}")
        code = 1
        if len(left) > 1:
            code = run.main(replace(made, arms=left), formats)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; what is finished is kept. Go on with: {made.command} --resume") from None
    _print(made, found, gross)
    return 1 if gross else code


def _early_layers(
    made: RunOptions, options: argparse.Namespace, say: Say
) -> tuple[dict[str, list[LayerEvidence]], dict[str, str]]:
    """Contract, kernel parity, routing, logprobs of every candidate; stored, so that --resume need not repeat them."""
    from evals.forced.run import Extent, measure

    stored = layers.load(made.out) if made.resume else {}
    if stored:
        return {name: list(rows) for name, rows in stored.items()}, {}
    found: dict[str, list[LayerEvidence]] = {}
    gross: dict[str, str] = {}
    for arm in made.arms[1:]:
        found[arm.name], why = _kernels(made, arm, say)
        if why:
            gross[arm.name] = why
    left = tuple(a for a in made.arms if a.name not in gross)
    if len(left) > 1:
        for forced in measure(replace(made, arms=left), Extent(options.long, options.long_tokens), made.out, say):
            found[forced.name] += [e for e in (forced.routing(), forced.logprobs()) if e is not None]
            why = forced.gross()
            if why:
                gross[forced.name] = f"logprobs: {why}"
    found = {name: [layers.explained(e) for e in layers.attributed(rows)] for name, rows in found.items()}
    layers.save(made.out, found)
    return found, gross


def _print(made: RunOptions, found: dict[str, list[LayerEvidence]], gross: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120)
    labels = {a.name: a.label for a in made.arms}
    for name, rows in found.items():
        table = Table(title=f"Layers · {labels[name]}", title_justify="left", box=None, pad_edge=False)
        for head in ("layer", "", "found"):
            table.add_column(head, overflow="fold")
        for e in rows:
            text = e.detail
            if e.moved and e.layer in layers.MEANING:
                means, look = layers.MEANING[e.layer]
                text += f"\nusually: {means}\nlook at: {look}"
            state = Text("moved", style="yellow") if e.moved else Text("ok", style="green")
            table.add_row(e.layer, state, Text(text))
        if name in gross:
            table.add_row("accuracy", Text("not run", style="red"), Text(gross[name]))
        console.print(table)
        if name in gross:
            console.print(Text(f"FAIL · {labels[name]} is broken · {made.out}"))
