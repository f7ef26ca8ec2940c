"""Judged runs over made-up arms, for tests of the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.data import Problems
from evals.records import Finding, Protocol, RunMeta
from evals.run_judge import Judged, assemble
from tests.evals.arms import arms, second_run


def protocol(n: int) -> Protocol:
    return Protocol(
        task="gsm8k",
        dataset_sha256="3730d312" + "0" * 56,
        items=tuple(f"{i:016x}" for i in range(n)),
        shots=5,
        shots_sha256="a" * 64,
        template_sha256="b" * 64,
        endpoint="completions",
        max_tokens=1024,
        stops=("\n\nQuestion:",),
        temperature=0.0,
        seed=1234,
        extractor="ours-1",
        concurrency=32,
        lm_eval_version="0.4.13",
    )


def meta(**changes: Any) -> RunMeta:
    fields: dict[str, Any] = {
        "schema": 1,
        "tool_version": "0.1.0",
        "task": "gsm8k",
        "model": "glm4moe-mini",
        "arms": {"baseline": "fp8/emulated:bias=bf16", "candidate": "fp8/emulated"},
        "margin": 1.5,
        "command": "evals run gsm8k --model mini --baseline fp8/emulated:bias=bf16 --candidate fp8/emulated",
        "data": {"label": "GSM8K test"},
        "timing": {"seconds": 12.5},
    }
    return RunMeta(**(fields | changes))


def judged(
    table: tuple[int, int, int, int],
    aa: tuple[int, int] | None = (13, 12),
    *,
    base: Mapping[str, Any] | None = None,
    cand: Mapping[str, Any] | None = None,
    findings: Sequence[Finding] = (),
    **changes: Any,
) -> Judged:
    """A judged run with this 2×2 table; `aa` = (lost, gained) flips of the baseline's second run, None = no A/A run."""
    runs = [*arms(*table, base=base, cand=cand)]
    if aa is not None:
        runs.append(second_run(*table, *aa))
    problems = Problems((), (), "3730d312", "GSM8K test", sum(table))
    return assemble(meta(**changes), protocol(sum(table)), problems, runs, findings)


FINGERPRINT = {
    "model": "glm4moe-mini",
    "format": "fp8",
    "weights_sha256": "4be1" * 16,
    "variant": {
        "requested": "fp8/emulated",
        "resolved": {str(i): "fp8/emulated" for i in range(1, 6)},
        "fallbacks": 0,
    },
    "versions": {"torch": "2.13.0", "transformers": "5.24.0", "triton": None},
}

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "img"
