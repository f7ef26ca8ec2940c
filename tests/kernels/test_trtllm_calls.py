"""TRT-LLM calls built on the CPU: bound to signatures, checked by contract, and interpreted to the right numbers."""

from __future__ import annotations

import pytest
import torch

from moe_kernels import registry
from moe_kernels.contract import TESTED_VERSIONS
from moe_kernels.errors import ContractError, VariantError
from moe_kernels.numerics import calc_diff
from moe_kernels.variants.trtllm import flashinfer_api as api
from moe_kernels.variants.trtllm.layers import Fp4TrtllmLayer, Fp8TrtllmLayer
from tests.kernels import trtllm_case as case

BIAS = torch.linspace(6.82, 7.06, 8)


def fp8_layer(options: str = "") -> Fp8TrtllmLayer:
    spec = registry.parse("fp8/trtllm" + (":" + options if options else ""))
    return Fp8TrtllmLayer(case.fp8_record(0), case.CONFIG, BIAS, spec)


def fp4_layer(options: str = "") -> Fp4TrtllmLayer:
    spec = registry.parse("nvfp4/trtllm" + (":" + options if options else ""))
    return Fp4TrtllmLayer(case.nvfp4_record(0, h=512), case.CONFIG, BIAS, spec)


def inputs(tokens: int, hidden: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, hidden, generator=g).bfloat16(), torch.randn(tokens, 8, generator=g)


@pytest.mark.parametrize("variant", ["fp8/trtllm", "nvfp4/trtllm"])
def test_a_swiglu_limit_is_refused_not_dropped(variant: str) -> None:
    record = case.fp8_record(0) if variant.startswith("fp8") else case.nvfp4_record(0, h=512)
    record.swiglu_limit = 10.0
    spec = registry.parse(variant)
    with pytest.raises(VariantError, match=r"does not pass swiglu_limit=10\.0 yet; use \w+/emulated"):
        registry.layer_class(spec)(record, case.CONFIG, BIAS, spec)


@pytest.mark.parametrize("version", TESTED_VERSIONS)
@pytest.mark.parametrize("make", [fp8_layer, fp4_layer])
@pytest.mark.parametrize("inside", [True, False])
def test_calls_bind_to_both_supported_versions(version: str, make, inside: bool) -> None:
    layer = make("routing=inside" if inside else "")
    hidden, logits = inputs(5, layer.shape.hidden_size)
    replay = torch.empty(5, 2, dtype=torch.int16) if inside else None
    call = layer.build_call(hidden, logits if inside else None, None if inside else layer.route(logits), replay)
    layer.check_call(call)
    kwargs = call.kwargs | {"routing_method_type": 2}
    api.bind_recorded(version, call.name, kwargs)
    with pytest.raises(ContractError, match="unknown arguments"):
        api.bind_recorded(version, call.name, kwargs | {"n_groups": 1})
    missing = {k: v for k, v in kwargs.items() if k != "gemm2_weights_scale"}
    with pytest.raises(ContractError, match="gemm2_weights_scale"):
        api.bind_recorded(version, call.name, missing)


def test_recorded_signatures_are_those_of_the_installed_version() -> None:
    if api.installed_version() not in TESTED_VERSIONS:
        pytest.skip(f"flashinfer-python installed: {api.installed_version()}")
    recorded = {n: [list(p) for p in api.recorded_parameters(api.installed_version(), n)] for n in api.ENTRY_POINTS}
    assert {n: [list(p) for p in ps] for n, ps in api.record_signatures().items()} == recorded


def test_position_trap_between_the_two_entry_points() -> None:
    """After enable_pdl the two FP8 entry points disagree, which is why calls are by keyword only."""
    inside = [p for p, _ in api.recorded_parameters("0.7.4", "trtllm_fp8_block_scale_moe")]
    routed = [p for p, _ in api.recorded_parameters("0.7.4", "trtllm_fp8_block_scale_routed_moe")]
    assert inside[inside.index("enable_pdl") + 1] != routed[routed.index("enable_pdl") + 1]


@pytest.mark.parametrize("tokens", [1, 3, 5, 7, 8, 64])
@pytest.mark.parametrize("options", ["", "scales=copied"])
def test_fp8_call_means_what_the_emulated_variant_computes(tokens: int, options: str) -> None:
    layer = fp8_layer(options)
    hidden, logits = inputs(tokens)
    routing = layer.route(logits)
    call = layer.build_call(hidden, None, routing, None)
    got = case.run_fp8_call(call.kwargs, routing)
    emulated = registry.layer_class(registry.parse("fp8/emulated"))(
        case.fp8_record(0), case.CONFIG, BIAS, registry.parse("fp8/emulated")
    )
    want = emulated.experts(hidden.float(), routing)
    assert calc_diff(got, want) < 1e-6


def test_fp8_call_agrees_with_flashinfers_own_reference() -> None:
    templates = pytest.importorskip("flashinfer.trace.templates.moe", reason="flashinfer-python is not installed")
    layer = fp8_layer("routing=inside")
    hidden, logits = inputs(7)
    k = layer.build_call(hidden, logits, None, torch.empty(7, 2, dtype=torch.int16)).kwargs
    names = (
        "routing_logits",
        "routing_bias",
        "hidden_states",
        "hidden_states_scale",
        "gemm1_weights",
        "gemm1_weights_scale",
        "gemm2_weights",
        "gemm2_weights_scale",
        "top_k",
        "n_group",
        "topk_group",
        "local_expert_offset",
        "routed_scaling_factor",
    )
    reference = templates._trtllm_fp8_block_scale_moe_ds_routing_reference(**{n: k[n] for n in names})
    ours = case.run_fp8_call(k, layer.route(logits))
    assert calc_diff(ours, reference.float()) < 1e-3  # theirs leaves the intermediate unquantised, in BF16


def test_bias_option_reaches_the_kernel_as_bf16() -> None:
    assert fp8_layer("routing=inside").kernel_bias.dtype == torch.float32
    old = fp8_layer("routing=inside,bias=bf16")
    assert old.kernel_bias.dtype == torch.bfloat16
    assert torch.equal(old.kernel_bias.float(), BIAS.bfloat16().float())


def test_enums_by_name_and_resolution() -> None:
    pytest.importorskip("flashinfer.fused_moe", reason="flashinfer-python is not installed")
    assert api.enum_value("RoutingMethodType", "DeepSeekV3") == 2
    assert api.enum_value("WeightLayout", "BlockMajorK") == 2
    assert "trtllm_fp8_block_scale_moe" in fp8_layer("routing=inside").resolved()


def test_refuses_softmax_routers() -> None:
    config = case.RoutingConfig(num_experts=8, top_k=2, scoring="softmax")
    with pytest.raises(VariantError, match="DeepSeekV3 routing"):
        Fp8TrtllmLayer(case.fp8_record(0), config, None, registry.parse("fp8/trtllm"))


def test_cpu_is_refused_with_the_nearest_variant() -> None:
    support = registry.supports(registry.parse("fp8/trtllm"), torch.device("cpu"), fp8_layer().shape)
    assert not support.ok and support.nearest == "fp8/emulated" and "CUDA" in support.reason
