"""The serving kernels' arithmetic on the CPU, in Triton's interpreter, against the torch references."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.interpreted import run_cases

pytest.importorskip("triton")

# Largest relative L2 distance: kernels that round where the reference does give its bits but for an FP32 last bit now
# and then; attention rounds probabilities to BF16 (2^-9), the reference does not.
LIMITS = {
    "norm_T3": 1e-4, "norm_T5_splits": 1e-4, "swiglu_T1": 1e-3, "swiglu_T7_splits": 1e-3, "swiglu_T5_ragged": 1e-3,
    "rope_glm": 1e-6, "rope_norm": 1e-3, "rope_full": 1e-3, "linear_fp8_T1": 1e-3, "linear_fp8_T7_bias": 1e-3,
    "linear_fp8_T19_bias_split": 1e-3,
    "linear_fp8_T2_empty_part": 1e-3, "linear_bf16_T3": 1e-3, "linear_bf16_T17_bias": 1e-3, "router_T1": 1e-6,
    "router_T37": 1e-6, "decode_long": 4e-3, "decode_quantised": 4e-3, "decode_more_chunks_than_splits": 4e-3,
    "prefill": 4e-3,
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Every case, run once in a process of its own: the interpreter is switched on at import."""
    return run_cases("ops_cases.py")


@pytest.mark.parametrize("name", LIMITS)
def test_operation_matches_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    """Values, and whatever must be equal to the bit (see `ops_cases.py`)."""
    case = results[name]
    assert case["rel"] < LIMITS[name] and case["finite"]
    assert case["dtype"] == ("torch.float32" if name.startswith("router") else "torch.bfloat16")
    flags = {key: value for key, value in case.items() if key.endswith(("_equal", "_kept", "_zero"))}
    assert all(flags.values()), flags
    assert case.get("alone", 0) < 1e-4 and case.get("k", 0) < 1e-3


def test_long_k_is_split(results: dict[str, dict[str, Any]]) -> None:
    """The cases above did exercise split sums."""
    assert results["linear_fp8_T2_empty_part"]["splits"] == 8  # 41 blocks in parts of 6: the eighth is empty
    assert results["linear_fp8_T1"]["parts"] == [2, 1, 256] and results["linear_bf16_T3"]["splits"] == 2
