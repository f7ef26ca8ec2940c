"""`evals compare RUN_A RUN_B`: judge two arms that were run before."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `evals compare`."""
    arm = "a run folder (its baseline), or RUN:ARM, e.g. runs/x:candidate"
    parser.add_argument("baseline", metavar="RUN_A", help=arm)
    parser.add_argument("candidate", metavar="RUN_B", help="likewise")
    parser.add_argument("--margin", type=float, metavar="PT", help="default: RUN_A's")
    parser.add_argument("--factor", action="append", default=[], metavar="F",
                        help="protocol or server field that differs on purpose")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the reports there")
    parser.add_argument("--format", action="append", metavar="F", help="terminal, md, json, junit, html, github")


def main(options: argparse.Namespace) -> int:
    """Compare, print, and return the verdict's exit code."""
    from evals.protocol import check_factors
    from evals.run_compare import compare_runs
    from evals.run_report import check_formats, publish

    formats = check_formats(options.format)
    judged = compare_runs(options.baseline, options.candidate, options.margin, check_factors(options.factor))
    return publish(judged, options.out, formats, sys.stdout)
