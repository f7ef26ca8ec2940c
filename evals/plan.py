"""`evals plan`: what a margin costs in items and repeats, and what a number of items can show, before any run."""

from __future__ import annotations

import argparse
import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from evals.errors import UsageError
from evals.statistics import (
    attainable_margin,
    detectable_drop,
    noninferiority_power,
    regression_power,
    required_items,
    required_repeats,
    standard_error,
)
from evals.wording import percent

GSM8K = 1319


@dataclass(frozen=True)
class Plan:
    """Answers for one margin, discordance and number of items; margins and differences in points."""

    margin: float
    discordance: float
    n: int
    alpha: float
    power: float
    standard_error: float
    items: int
    repeats: int | None
    attainable: float
    attainable_equivalence: float
    detectable: float
    power_if_equal: float
    flag_if_margin_worse: float


def plan(
    margin: float, discordance: float, n: int = GSM8K, alpha: float = 0.05, power: float = 0.8, true_drop: float = 0.0
) -> Plan:
    """Plan a run. `margin` and `true_drop` in points (1.5 = 1.5 percentage points), `discordance` a fraction.

    Powers are exact sums over the outcomes of one pass over n items, not normal approximations. Discordance is what
    an A/A run shows; 2–6 % is usual for FP8 and FP4 MoE kernels under concurrency, 0 for a deterministic server.
    """
    if not 0 < margin < 100:
        raise UsageError(f"--margin is in points of accuracy, above 0 and below 100; got {margin:g}")
    if not 0 <= discordance <= 1:
        raise UsageError(f"--discordance is a share of items between 0 and 1 (0.04 = 4 %); got {discordance:g}")
    if n < 1:
        raise UsageError(f"--n must be at least 1 item; got {n}")
    if not (0 < alpha < 0.5 and 0 < power < 1):
        raise UsageError(f"need 0 < --alpha < 0.5 and 0 < --power < 1; got {alpha:g} and {power:g}")
    if true_drop >= margin:
        raise UsageError(
            f"a candidate that is truly {true_drop:g} points worse cannot be shown to be within {margin:g} points"
        )
    if true_drop / 100 > discordance:
        raise UsageError(f"a drop of {true_drop:g} points needs a discordance of at least {true_drop / 100:g}")
    delta, drop = margin / 100, true_drop / 100
    worse = min(delta, discordance)
    return Plan(
        margin=margin,
        discordance=discordance,
        n=n,
        alpha=alpha,
        power=power,
        standard_error=100 * standard_error(discordance, n, drop),
        items=required_items(delta, discordance, alpha, power, -drop),
        repeats=required_repeats(delta - drop, discordance, n, 0.0, alpha, power),
        attainable=100 * attainable_margin(discordance, n, alpha, power) + true_drop,
        attainable_equivalence=100 * attainable_margin(discordance, n, alpha, power, tost=True) + true_drop,
        detectable=100 * detectable_drop(discordance, n, alpha, power),
        power_if_equal=noninferiority_power(n, discordance, -drop, delta, alpha),
        flag_if_margin_worse=regression_power(n, discordance, -worse, alpha),
    )


def render(answer: Plan, *, color: bool = False, width: int = 100) -> str:
    """The plan in words, with a small table of neighbouring margins and discordances."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=color, no_color=not color, highlight=False)
    psi = percent(answer.discordance, 1)
    console.print(
        f"To show that a candidate is at most {answer.margin:g} points worse (one-sided "
        f"{percent(1 - answer.alpha, 1)}, {percent(answer.power, 0)} power) at {psi} discordance: {answer.items} items."
    )
    if answer.items > answer.n:
        if answer.repeats and answer.repeats > 1:
            console.print(
                f"With {answer.n} items: --repeats {answer.repeats}, if the discordance is run-to-run noise; "
                "differences between the kernels are not averaged away."
            )
    else:
        console.print(f"{answer.n} items are enough in one pass.")
    console.print(
        f"{answer.n} items show a margin of {answer.attainable:.2f} points (both sides: "
        f"{answer.attainable_equivalence:.2f}), and flag a drop of {answer.detectable:.2f} points; standard error "
        f"{answer.standard_error:.3f}."
    )
    console.print(
        f"With {answer.n} items and {answer.margin:g} points: P(PASS) = {answer.power_if_equal:.2f} for the assumed "
        f"candidate, P(flagged) = {answer.flag_if_margin_worse:.2f} for one that is a margin worse (exact)."
    )
    table = Table(title=f"\nItems needed ({percent(answer.power, 0)} power)", title_justify="left", box=None)
    psis = sorted({0.01, 0.02, 0.04, 0.06, answer.discordance})
    table.add_column("margin")
    for value in psis:
        table.add_column(f"{percent(value, 1)} discordant", justify="right")
    for margin in sorted({0.5, 1.0, 1.5, 2.0, 3.0, answer.margin}):
        cells = [str(required_items(margin / 100, value, answer.alpha, answer.power)) for value in psis]
        table.add_row(f"{margin:g} pt", *cells)
    console.print(table)
    return buffer.getvalue()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `evals plan`."""
    add = parser.add_argument
    add("--margin", type=float, default=1.5, metavar="PT", help="largest acceptable drop in points (default 1.5)")
    add(
        "--discordance",
        type=float,
        default=0.04,
        metavar="SHARE",
        help="share of items on which two runs differ, as an A/A run shows (default 0.04)",
    )
    add("--n", type=int, default=GSM8K, metavar="N", help=f"items available (default {GSM8K}, GSM8K's test set)")
    add("--alpha", type=float, default=0.05, help="one-sided error level (default 0.05)")
    add("--power", type=float, default=0.8, help="wanted chance to show it (default 0.8)")
    add("--true-drop", type=float, default=0.0, metavar="PT", help="assumed true drop of the candidate (default 0)")


def main(options: argparse.Namespace) -> int:
    """Print the plan."""
    answer = plan(options.margin, options.discordance, options.n, options.alpha, options.power, options.true_drop)
    print(render(answer), end="")
    return 0
