"""Times pairing, verdict and reports for 1,319 items from records in memory: `python benchmarks/verdict.py`."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import scipy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evals import report as reports
from evals.floor import Floor
from evals.pairing import pair
from evals.report.model import build
from evals.verdict import judge
from tests.evals.arms import arms, second_run
from tests.evals.judging import judged

TABLE = (1249, 19, 13, 38)


def timed(what: Callable[[], Any], repeats: int) -> float:
    """Median seconds over `repeats` calls after one warm-up."""
    what()
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        what()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    options = parser.parse_args()
    base, cand = arms(*TABLE)
    again = second_run(*TABLE, 13, 12)
    run = judged(TABLE)
    made = build(run)

    def verdict() -> None:
        judge(pair(base, cand), floor=Floor.measured(pair(base, again)))

    rows = [
        ("pairing (two arms)", timed(lambda: pair(base, cand).counts, options.repeats)),
        ("pairing, A/A floor and verdict", timed(verdict, options.repeats)),
        ("report.json, validated", timed(lambda: build(run), options.repeats)),
        *((f"render {form}", timed(lambda f=form: reports.render(made, f), options.repeats))  # type: ignore[misc]
          for form in ("terminal", "md", "junit", "html")),
    ]  # fmt: skip
    for name, seconds in rows:
        print(f"{name:34s} {seconds * 1000:8.1f} ms")
    print(f"{'all':34s} {sum(s for _, s in rows[1:]) * 1000:8.1f} ms   (goal: pairing and verdict < 2 s)")
    if options.out:
        versions = {"python": platform.python_version(), "numpy": numpy.__version__, "scipy": scipy.__version__}
        options.out.write_text(
            json.dumps([{"what": n, "ours": s, "peer": None, "ratio": None, "unit": "s",
                         "command": "python benchmarks/verdict.py", "versions": versions} for n, s in rows], indent=1)
            + "\n"
        )  # fmt: skip


if __name__ == "__main__":
    main()
