"""The detection matrix: on the terminal, as JSON and as a document."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.selftest_alarms import DISCORDANCE, simulate
from evals.selftest_bench import Sizes
from evals.selftest_judge import GATES, LAYERS, Row


@dataclass(frozen=True)
class Matrix:
    """All rows of a self-test; `repeats` are A/A comparisons of the sound servers."""

    rows: Sequence[Row]
    repeats: Sequence[Row]
    model: str
    sizes: Sizes
    seconds: float

    @property
    def right(self) -> bool:
        """Every harmful fault caught, every benign change and every repeat passed."""
        return all(r.right for r in (*self.rows, *self.repeats))


def row_dict(row: Row) -> dict[str, Any]:
    """One entry of faults.json."""
    first = row.first
    spent = {"contract": "kernel", "kernel": "kernel", "routing": "forced", "logprobs": "forced"}
    return {
        "fault": row.name, "source": row.source, "summary": row.summary, "row": row.catalogue, "format": row.fmt,
        "harmful": row.harmful, "layer_caught": first, "caught": dict(row.caught), "measured": dict(row.measured),
        "effect": row.caught[first] if first else "; ".join(row.measured.values()),
        "items": row.items.get(first, 0) if first else max(row.items.values(), default=0),
        "seconds": row.seconds.get(spent.get(first, "answers")) if first else round(sum(row.seconds.values()), 2),
        "others_caught": list(row.others), "right": row.right,
    }


def write_json(matrix: Matrix, path: Path) -> None:
    """The list of faults."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row_dict(r) for r in matrix.rows]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def summary(matrix: Matrix) -> str:
    """One sentence per kind of row."""
    harmful = [r for r in matrix.rows if r.harmful]
    benign = [r for r in matrix.rows if not r.harmful]
    missed = [r.name for r in harmful if not r.caught]
    alarms = [r.name for r in benign if r.caught]
    return (
        f"{len(harmful) - len(missed)} of {len(harmful)} harmful faults caught"
        + (f" (missed: {', '.join(missed)})" if missed else "")
        + f"; {len(benign) - len(alarms)} of {len(benign)} benign changes passed"
        + (f" (alarms: {', '.join(alarms)})" if alarms else "")
        + f"; {sum(not r.caught for r in matrix.repeats)} of {len(matrix.repeats)} repeats of the sound server passed"
    )


def show(matrix: Matrix) -> None:
    """The matrix as a table."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(box=None, pad_edge=False)
    table.add_column("fault", no_wrap=True)
    for layer in LAYERS:
        table.add_column(layer, justify="center")
    table.add_column("effect", overflow="fold")
    table.add_column("seen by others")
    table.add_column("")
    for row in matrix.rows:
        entry = row_dict(row)
        cells = [Text("●", style="green" if row.harmful else "red") if x in row.caught else Text("·") for x in LAYERS]
        verdict = ("caught" if row.caught else "MISSED") if row.harmful else ("FALSE ALARM" if row.caught else "passed")
        name = row.name if row.harmful else f"{row.name} (benign)"
        table.add_row(name, *cells, str(entry["effect"])[:60], " ".join(row.others),
                      Text(verdict, style="green" if row.right else "bold red"))
    console.print(table)
    console.print(f"{summary(matrix)}; {matrix.seconds:.0f} s", highlight=False)


def write_markdown(matrix: Matrix, path: Path) -> None:
    """docs/faults.md: how it was made, the matrix, effects and costs, false alarms."""
    harmful = [r for r in matrix.rows if r.harmful]
    seen = {g: sum(g in r.others for r in harmful) for g in GATES}
    ours = {x: sum(x in r.caught for r in harmful) for x in LAYERS}
    lines = [
        _INTRO.format(
            model=matrix.model, summary=summary(matrix), seconds=f"{matrix.seconds:.0f}", texts=matrix.sizes.texts,
            long=matrix.sizes.long, answers=matrix.sizes.answers, machine=platform.machine(),
            python=platform.python_version(),
        ),
        "## Matrix\n",
        "● moved, · not; blank where the layer was not run. Benign changes must show no ●.\n",
        "| fault | on | " + " | ".join(LAYERS) + " | what others' gates say |",
        "|---|---|" + ":-:|" * len(LAYERS) + "---|",
    ]
    for r in matrix.rows:
        cells = ["●" if x in r.caught else "·" if x in r.items or x in r.measured else "" for x in LAYERS]
        others = ", ".join(r.others) or "nothing"
        name = f"`{r.name}`" + ("" if r.harmful else " (benign)")
        lines.append(f"| {name} | {r.fmt} | " + " | ".join(cells) + f" | {others} |")
    lines += [
        "", f"Of {len(harmful)} harmful faults: " + ", ".join(f"{k} sees {v}" for k, v in ours.items())
        + ". Others' gates: " + ", ".join(f"{k} sees {v}" for k, v in seen.items()) + ".",
        "", "## Effects and costs", "",
        "Seconds are those of the first layer that moved, on a busy two-core machine; items are what it asked.", "",
        "| fault | what it is | source | effect | items | s |", "|---|---|---|---|--:|--:|",
    ]
    for r in matrix.rows:
        e = row_dict(r)
        where = f"{e['layer_caught']}: " if e["layer_caught"] else ""
        effect = f"{where}{e['effect']}".replace("|", "/")
        lines.append(f"| `{r.name}` | {r.summary} | {r.source} | {effect} | {e['items']} | {e['seconds']} |")
    lines += ["", *_alarms(matrix)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _alarms(matrix: Matrix) -> list[str]:
    passed = sum(not r.caught for r in matrix.repeats)
    out = [
        "## False alarms", "",
        f"Forced layers, measured: the sound servers were compared with themselves {len(matrix.repeats)} times at "
        f"concurrency 2 to 16 against the recording at 8; {passed} passed.", "",
        "Accuracy, simulated (200 runs of 1,319 items each; no machine here does 200 real ones): items flip "
        "independently with the discordance ψ₀ between two runs of one server. One that repeats itself has ψ₀ = 0; "
        "2 to 6 % is published for FP8 and FP4 MoE kernels.", "",
        "| ψ₀ | FAIL, α = 0.05 | FAIL, α = 0.001 | CHANGED by flips |", "|--:|--:|--:|--:|",
    ]
    for psi in DISCORDANCE:
        loose, strict = simulate(psi), simulate(psi, alpha=0.001)
        out.append(f"| {100 * psi:g} % | {loose.failed} of {loose.runs} | {strict.failed} of {strict.runs} "
                   f"| {loose.changed} of {loose.runs} |")
    out += ["", "The level α is the false-alarm rate a noisy server may have by construction (docs/statistics.md §2)."]
    return out


_INTRO = """# Faults: what the gate catches

Real faults from public issues, switched on in a running service (`service/selftest.py`, `moe_kernels/faults/`), judged
by the same limits as real runs. Made by `python benchmarks/fault_matrix.py` on `{model}`, {machine}, Python {python},
in {seconds} s: {texts} gold texts and {long} long one, {answers} free-running answers a fault.

**{summary}.**

## Layers and limits

| layer | moves when | why this limit |
|---|---|---|
| contract | a scale is not finite, zero or tiny; routing parameters outside the launcher's rules | [1] |
| kernel | calc_diff ≥ 1.5e-3 to the emulation, ≥ 4e-3 (FP8) or 5e-2 (NVFP4) to the FP32 oracle; a probe fails | [2] |
| routing | > 2 % of the tokens of a layer go to other experts although the choice was no near tie | [3] |
| logprobs | mean KL > 0.005 nats a token with equal weights, > 0.02 otherwise; top-1 changed for > 2 %; NaN | [4] |
| length | completion length outside 0.9–1.1 (interval), cut or empty answers differ | MLPerf's rule |
| accuracy | a regression is shown (mid-p < 0.05, not non-inferior at 1.5 points) | docs/statistics.md |

[1] `moe_kernels/check_static.py`: what the launchers demand; RoPE frequencies are the config's in FP32.
[2] The head of `moe_kernels/check.py`; probes are repeat,
batch, padding, zero block, extreme logits. [3] A near tie is a gap of the selection keys below 2⁻⁸, BF16's step just
below 1: BF16 logits, which kernels may take, flip 1 to 3 % of the tokens there. Benign changes flipped none
elsewhere on this model and at most 0.7 % on glm4moe-mini; the mildest routing fault 10 %. [4] Benign changes gave at
most 2e-4 on this model, and 2.1e-3 on glm4moe-mini for texts four times as long as it was trained on; llama.cpp's
Q8_0 has 1.4e-3, Q4_K_M 0.031. RoPE in BF16 gave 9e-4 and 8e-3: logprobs alone cannot tell it from rounding on every
model, so its frequencies are compared with the config's.

Limits of routing and logprobs rise to five times what the baseline shows against itself at another concurrency.

Others' gates on the same data: *flashinfer* (torch.isclose, atol 0.1, rtol 0.85, 79 % of the elements), *vllm* (atol =
rtol = 0.035 for every element where the sound kernel passes it, or accuracy 0.08 below the reference), *sglang* (200
questions, 3 points below), *trtllm* (3.20 points below, σ = 50, n = 1,319), *plain* (unpaired one-sided test at n =
1,319). Accuracies are those of the answers asked here.
"""
