"""The table of a bench."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from service.bench.rounds import Comparison, Ratio, Round


def show(found: Sequence[Comparison], console: Console | None = None) -> None:
    """A row per concurrency and target (medians over rounds), and the ratio of two targets with its interval."""
    table = Table(title="medians over rounds; times in ms")
    for name in ("concurrency", "in/out", "target", "tok/s", "decode tok/s", "TTFT p50", "TTFT p99", "ITL p50",
                 "ITL p99", "failed"):
        table.add_column(name, justify="left" if name == "target" else "right")
    for one in found:
        for target, rounds in one.rounds.items():
            table.add_row(
                str(one.concurrency), f"{one.prompt}/{one.output}", target, _middle(rounds, "tok_s"),
                _middle(rounds, "decode_tok_s"), _time(rounds, "ttft_ms", "p50"), _time(rounds, "ttft_ms", "p99"),
                _time(rounds, "itl_ms", "p50"), _time(rounds, "itl_ms", "p99"), str(sum(r.errors for r in rounds)))
    console = console or (Console() if sys.stdout.isatty() else Console(width=160))
    console.print(table)
    for one in found:
        if one.ratio is not None and one.decode_ratio is not None:
            a, b = one.rounds
            console.print(f"concurrency {one.concurrency}: {a} over {b}: {_said(one.ratio)} in all, "
                          f"{_said(one.decode_ratio)} decoding", soft_wrap=True)


def _middle(rounds: Sequence[Round], name: str) -> str:
    return f"{statistics.median(getattr(r, name) for r in rounds):.1f}"


def _time(rounds: Sequence[Round], name: str, key: str) -> str:
    values = [getattr(r, name)[key] for r in rounds if getattr(r, name)]
    return f"{statistics.median(values):.2f}" if values else "-"


def _said(ratio: Ratio) -> str:
    return f"{ratio.ratio:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] ({ratio.rounds} pairs)"
