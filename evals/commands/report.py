"""`evals report RUN`: judge a run folder again from its journal and print it in any format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `evals report`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--format", action="append", metavar="F", help="terminal, md, json, junit, html, github")


def main(options: argparse.Namespace) -> int:
    """Write the report files anew and print; the exit code is the verdict's."""
    from evals.run_judge import judge_run
    from evals.run_report import check_formats, publish

    formats = check_formats(options.format)
    return publish(judge_run(options.run), options.run, formats, sys.stdout)
