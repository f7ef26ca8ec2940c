"""The one place that touches flashinfer: version gate, enums by name, signatures, binding, tuning state."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from moe_kernels.contract import TESTED_VERSIONS, check_version
from moe_kernels.errors import ContractError, VariantError

ENTRY_POINTS = (
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
)


def installed_version() -> str | None:
    """flashinfer-python's version, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def require(bias_dtype: torch.dtype | None) -> tuple[Any, tuple[str, ...]]:
    """(flashinfer.fused_moe, warnings), or VariantError / ContractError with the remedy."""
    version = installed_version()
    if version is None:
        raise VariantError("the TRT-LLM kernels need flashinfer-python: pip install 'moe-parity[gpu]'")
    warnings = check_version(version, bias_dtype)
    try:
        import flashinfer.fused_moe as fused_moe
    except ImportError as error:
        raise VariantError(f"flashinfer-python {version} does not import: {error}") from error
    return fused_moe, tuple(warnings)


def enum_value(enum: str, member: str) -> int:
    """Value of an enum member by name: the numbers moved between versions, the names did not."""
    fused_moe, _ = require(None)
    return int(getattr(fused_moe, enum)[member])


@cache
def recorded_parameters(version: str, name: str) -> tuple[tuple[str, bool], ...]:
    """((parameter, required), ...) of an entry point as recorded from a released version."""
    text = files("moe_kernels.variants.trtllm").joinpath("signatures.json").read_text()
    try:
        return tuple((p, bool(required)) for p, required in json.loads(text)[version][name])
    except KeyError:
        raise VariantError(
            f"no recorded signature of {name} for flashinfer {version}; recorded: {', '.join(TESTED_VERSIONS)}"
        ) from None


def record_signatures() -> dict[str, list[tuple[str, bool]]]:
    """Signatures of the installed version, in the form kept in signatures.json."""
    fused_moe, _ = require(None)
    out: dict[str, list[tuple[str, bool]]] = {}
    for name in ENTRY_POINTS:
        parameters = inspect.signature(getattr(fused_moe, name)).parameters.values()
        out[name] = [(p.name, p.default is inspect.Parameter.empty) for p in parameters]
    return out


def bind_recorded(version: str, name: str, kwargs: Mapping[str, Any]) -> None:
    """Check a keyword call against a recorded signature; ContractError names what is missing or unknown."""
    parameters = dict(recorded_parameters(version, name))
    unknown = [k for k in kwargs if k not in parameters]
    missing = [p for p, required in parameters.items() if required and p not in kwargs]
    if unknown or missing:
        raise ContractError(f"{name} of flashinfer {version}: unknown arguments {unknown}, missing arguments {missing}")


def bind(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check a keyword call against the installed function's own signature."""
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise ContractError(f"{name} of flashinfer {installed_version()}: {error}") from error


def tuning_state() -> dict[str, Any]:
    """Autotuner state for the fingerprint: whether any tactic was profiled, and which were chosen.

    Timing-driven tactics differ by process and rank (SGLang #35343), so two runs are comparable only if this
    is recorded. Without a tuning run every call uses the fallback tactic.
    """
    try:
        from flashinfer.autotuner import AutoTuner

        cache_ = AutoTuner.get().profiling_cache
    except (ImportError, AttributeError):
        return {"state": "unknown", "tactics": {}}
    tactics = {
        str(key[:2]): str(value[1] if isinstance(value, tuple) and len(value) > 1 else value)
        for key, value in cache_.items()
    }
    return {"state": "tuned" if tactics else "fallback tactic", "tactics": tactics}
