"""The Triton kernels' arithmetic on the CPU, in Triton's interpreter, against torch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.interpreted import run_cases

pytest.importorskip("triton")

LAYERS = ["fp8_T1_swap", "fp8_T5_swap", "fp8_T7_plain", "fp8_T70_plain", "fp8_before", "nvfp4_T1", "nvfp4_T37",
          "nvfp4_T5_act", "fp8_limit", "nvfp4_limit"]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Every case, run once in a process of its own: the interpreter is switched on at import."""
    return run_cases("triton_cases.py")


@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    """Within BF16's rounding of expert outputs and result (2^-9 each), same experts, inputs untouched."""
    case = results[name]
    assert case["ids_equal"] and case["ids_dtype"] == "torch.int64"
    assert case["weights_max"] < 5e-7
    assert case["rel"] < 4e-3 and case["calc_diff"] < 1e-5
    assert case["apart_equal"], "route() then experts() must give forward()'s bits"
    assert case["untouched"] and case["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("name", ["quantise_T1", "quantise_T37"])
def test_quantiser_gives_the_bytes_of_torch(results: dict[str, dict[str, Any]], name: str) -> None:
    """Values, scales and layout; a NaN is not clamped away."""
    case = results[name]
    assert case["bytes_equal"] and case["scales_equal"] and case["layouts_equal"]
    assert case["column_shape"][0] == 3 and case["column_contiguous"]
    assert case["nan_kept"]


@pytest.mark.parametrize("name", ["sort_one_token", "sort_one_chunk", "sort_chunks", "sort_prefix"])
def test_sort_is_stable_and_tiles_cover_all_rows(results: dict[str, dict[str, Any]], name: str) -> None:
    """With empty experts and an odd number of tokens, by each of the ways the sort is launched."""
    assert all(results[name].values()), results[name]


def test_routing_edge_cases(results: dict[str, dict[str, Any]]) -> None:
    """Ties, underflow, NaN and the BF16 bias."""
    case = results["routing"]
    assert case["ties"] == [0, 1, 2, 3]
    assert case["underflow_finite"] and case["nan_shows"]
    assert case["bf16_bias_equal"] and case["bf16_bias_differs"]
