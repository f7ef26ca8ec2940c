"""Draw the learning curve of training logs: `python -m evals.mini.plot OUT.png LABEL=RUN/log.jsonl ...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Loss records and teacher-forced records of a log."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in records if "loss" in r], [r for r in records if "exact" in r]


def draw(target: Path, runs: dict[str, Path]) -> None:
    """Loss on a logarithmic axis, and the share of held-out problems whose whole answer is greedy-exact."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for label, path in runs.items():
        losses, exact = read(path)
        left.plot([r["step"] for r in losses], [r["loss"] for r in losses], label=label)
        right.plot([r["step"] for r in exact], [100 * r["exact"] for r in exact], marker=".", label=label)
    left.set(xlabel="step", ylabel="training loss (answer tokens weigh 1, question tokens 0.1)", yscale="log")
    left.yaxis.label.set_fontsize(8)
    right.set(xlabel="step", ylabel="held-out answers exact, teacher-forced, %", ylim=(0, 100))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), {k: Path(v) for k, _, v in (a.partition("=") for a in sys.argv[2:])})
