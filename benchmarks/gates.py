"""P(pass) of the field's accuracy gates and of ours, computed exactly: `python benchmarks/gates.py`.

Reference accuracy 0.960; each cell is the chance that one run of a model whose true accuracy is the column's passes.
The gates' rules are those of their public code (see docs/statistics.md); nothing is simulated.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom, norm

from evals.statistics import critical, mcnemar_midp, tango_z
from evals.statistics.power import outcome_grid

REFERENCE = 0.96
TRUE = (0.960, 0.955, 0.950, 0.945, 0.940, 0.930, 0.920, 0.900)
N = 1319


def at_least(threshold: float, p: float, n: int = N) -> float:
    """P(accuracy measured on n items >= threshold)."""
    return float(binom.sf(math.ceil(threshold * n - 1e-9) - 1, n, p))


def tensorrt_llm(p: float, sigma: float = 50.0) -> float:
    """Hypothesis test with alpha 0.05 on two unpaired runs: threshold = ref + z_alpha sqrt(2 sigma²/n), points."""
    return at_least(REFERENCE + norm.ppf(0.05) * math.sqrt(2 * sigma**2 / N) / 100, p)


def vllm_evals(p: float) -> float:
    """measured >= threshold 0.90 - tolerance 0.08."""
    return at_least(0.90 - 0.08, p)


def isclose_rtol(p: float) -> float:
    """np.isclose(measured, reference, rtol=0.08), two-sided."""
    return at_least(REFERENCE * 0.92, p)


def llm_compressor(p: float) -> float:
    """round(measured / base, 2) >= 0.95 on 1,000 items, base = the reference."""
    return at_least(0.945 * REFERENCE, p, 1000)


def sglang_kit(p: float) -> float:
    """200 questions, accuracy >= 0.93."""
    return at_least(0.93, p, 200)


def inferencex(p: float) -> float:
    """Floor 0.94."""
    return at_least(0.94, p)


def mlperf(p: float, share: float) -> float:
    """A fixed share of the reference."""
    return at_least(share * REFERENCE, p)


def vllm_ci(p: float, rtol: float = 0.01) -> float:
    """One-sided 95 % Wilson lower bound of one run >= reference (1 - rtol), the reference taken as exact."""
    x = np.arange(N + 1)
    z, share = critical(0.05), x / N
    half = z * np.sqrt(share * (1 - share) / N + z * z / (4 * N * N))
    low = (share + z * z / (2 * N) - half) / (1 + z * z / N)
    return float(binom.pmf(x, N, p)[low >= REFERENCE * (1 - rtol)].sum())


def paired(p: float, run_noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outcomes (b, c, probability) of a paired comparison: run noise plus the true drop as extra lost answers."""
    drop = REFERENCE - p
    return outcome_grid(N, run_noise + drop, -drop)


def nel_gate(p: float, run_noise: float, max_drop: float = 0.015) -> float:
    """NeMo Evaluator's gate: upper end of the 95 % interval of the paired damage <= max_drop (n large: t = z)."""
    b, c, weight = paired(p, run_noise)
    d = (c - b) / N
    half = norm.isf(0.025) * np.sqrt(np.maximum(b + c - N * d * d, 0) / (N - 1) / N)
    return float(weight[d - half >= -max_drop].sum())


def ours_pass(p: float, run_noise: float, margin: float = 0.015) -> float:
    """Non-inferiority shown by the one-sided 95 % Tango bound."""
    b, c, weight = paired(p, run_noise)
    return float(weight[np.asarray(tango_z(b, c, N, -margin)) > critical(0.05)].sum())


def ours_fail(p: float, run_noise: float, margin: float = 0.015) -> float:
    """Regression shown (mid-p < 0.05, not non-inferior)."""
    b, c, weight = paired(p, run_noise)
    passed = np.asarray(tango_z(b, c, N, -margin)) > critical(0.05)
    return float(weight[(np.asarray(mcnemar_midp(b, c)) < 0.05) & ~passed].sum())


ROWS = (
    ("TensorRT-LLM, sigma 50", tensorrt_llm),
    ("vLLM evals, 0.90 − 0.08", vllm_evals),
    ("isclose rtol 0.08 (vLLM, SGLang)", isclose_rtol),
    ("llm-compressor, ≥ 0.95 rounded, n = 1000", llm_compressor),
    ("SGLang kit, 200 questions ≥ 0.93", sglang_kit),
    ("InferenceX, ≥ 0.94", inferencex),
    ("MLPerf 99 %", lambda p: mlperf(p, 0.99)),
    ("MLPerf 99.9 %", lambda p: mlperf(p, 0.999)),
    ("vLLM gate=ci, rtol 0.01", vllm_ci),
    ("nel gate, max_drop 1.5 pt, noise 2 %", lambda p: nel_gate(p, 0.02)),
    ("ours PASS, margin 1.5 pt, noise 0 %", lambda p: ours_pass(p, 0.0)),
    ("ours PASS, margin 1.5 pt, noise 2 %", lambda p: ours_pass(p, 0.02)),
    ("ours PASS, margin 1.5 pt, noise 4 %", lambda p: ours_pass(p, 0.04)),
    ("ours FAIL, noise 0 %", lambda p: ours_fail(p, 0.0)),
    ("ours FAIL, noise 2 %", lambda p: ours_fail(p, 0.02)),
    ("ours FAIL, noise 4 %", lambda p: ours_fail(p, 0.04)),
)


def table() -> str:
    """The Markdown table of docs/statistics.md."""
    lines = ["| gate | " + " | ".join(f"{p:.3f}" for p in TRUE) + " |", "|---|" + "---|" * len(TRUE)]
    for name, gate in ROWS:
        lines.append(f"| {name} | " + " | ".join(f"{gate(p):.2f}" for p in TRUE) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
