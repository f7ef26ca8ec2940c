"""The contract names the tensor at fault for everything the launcher checks, and for what it does not."""

from __future__ import annotations

import pytest
import torch

from moe_kernels import contract
from moe_kernels.errors import ContractError
from moe_kernels.quant import fp8
from moe_kernels.records import MoEShape
from tests.kernels import trtllm_case as case
from tests.kernels.test_trtllm_calls import fp4_layer, fp8_layer, inputs


def fp8_kwargs(tokens: int = 5) -> dict:
    layer = fp8_layer("routing=inside")
    hidden, logits = inputs(tokens)
    return layer.build_call(hidden, logits, None, torch.empty(tokens, 2, dtype=torch.int16)).kwargs


def test_a_good_call_passes() -> None:
    contract.check_fp8_block_call(fp8_kwargs(), "DeepSeekV3")
    layer = fp4_layer()
    hidden, logits = inputs(5, 512)
    contract.check_fp4_call(layer.build_call(hidden, None, layer.route(logits), None).kwargs, "TopK")


@pytest.mark.parametrize("tokens", [1, 3, 5, 7])
def test_tma_padded_scales_are_refused_at_odd_m(tokens: int) -> None:
    """The fault FlashInfer's launcher does not see: stride ceil4(M), read as dense."""
    kwargs = fp8_kwargs(tokens)
    q, scale = fp8.quantize_activations(inputs(tokens)[0], layout="column_tma")
    padded = scale.t()
    if padded.is_contiguous():
        pytest.fail(f"M={tokens} should be padded")
    kwargs |= dict(hidden_states=q, hidden_states_scale=padded)
    with pytest.raises(ContractError, match=r"hidden_states_scale.*stride"):
        contract.check_fp8_block_call(kwargs, "DeepSeekV3")
    # and what it would have computed, had nobody looked
    layer = fp8_layer()
    routing = layer.route(inputs(tokens)[1])
    good = case.run_fp8_call(fp8_kwargs(tokens), routing)
    if tokens > 1:
        bad = case.run_fp8_call(kwargs, routing)
        assert (bad - good).norm() / good.norm() > 0.05


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(hidden_states=torch.zeros(5, 256)), "hidden_states"),
        (dict(hidden_states_scale=torch.ones(5, 2)), r"hidden_states_scale.shape.*\(2, 5\)"),
        (dict(hidden_states_scale=torch.ones(2, 5, dtype=torch.bfloat16)), "hidden_states_scale.dtype"),
        (dict(gemm1_weights=torch.zeros(8, 128, 256).to(torch.float8_e4m3fn)), "gemm1_weights.shape"),
        (dict(gemm2_weights_scale=torch.ones(8, 1, 2)), "gemm2_weights_scale.shape"),
        (dict(routing_bias=torch.zeros(8, dtype=torch.float64)), "routing_bias.dtype"),
        (dict(routing_logits=torch.zeros(5, 9)), "routing_logits.shape"),
        (dict(routing_replay_out=torch.zeros(5, 2)), "routing_replay_out"),
        (dict(routed_scaling_factor=None), "routed_scaling_factor"),
        (dict(routed_scaling_factor=float("nan")), "routed_scaling_factor"),
        (dict(n_group=0), "n_group"),
        (dict(n_group=None, topk_group=None), "n_group"),
        (dict(top_k=9), "num_experts|top_k"),
        (dict(local_expert_offset=4), "local experts"),
        (dict(intermediate_size=192), "multiples of 128"),
    ],
)
def test_each_broken_argument_is_named(change: dict, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        contract.check_fp8_block_call(fp8_kwargs() | change, "DeepSeekV3")


def test_fp4_scalars_are_required() -> None:
    layer = fp4_layer()
    hidden, logits = inputs(3, 512)
    kwargs = layer.build_call(hidden, None, layer.route(logits), None).kwargs
    for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar", "hidden_states_scale"):
        with pytest.raises(ContractError, match=name):
            contract.check_fp4_call(kwargs | {name: None}, "TopK")


@pytest.mark.parametrize(
    ("version", "bias", "outcome"),
    [
        ("0.6.7", torch.float32, "refused"),
        ("0.6.17", torch.float32, "refused"),
        ("0.6.18rc5", torch.float32, "refused"),
        ("0.6.17", torch.bfloat16, "warned"),
        ("0.6.18.post1", torch.float32, "fine"),
        ("0.7.4", torch.float32, "fine"),
        ("0.7.2", torch.float32, "warned"),
        ("0.8.0", torch.float32, "refused"),
        ("0.6.7", torch.bfloat16, "refused"),
    ],
)
def test_version_gate(version: str, bias: torch.dtype, outcome: str) -> None:
    if outcome == "refused":
        with pytest.raises(ContractError, match=version):
            contract.check_version(version, bias)
    else:
        assert bool(contract.check_version(version, bias)) == (outcome == "warned")


def test_routing_limits() -> None:
    def ok(method: str, e: int, k: int, groups: int = 1, kept: int = 1) -> None:
        contract.check_routing(method, e, k, groups, kept, 0, e, 2.5)

    ok("DeepSeekV3", 256, 8)  # GLM-5.x
    ok("DeepSeekV3", 160, 8)  # GLM-4.7
    ok("DeepSeekV3", 64, 4)
    ok("DeepSeekV3", 256, 8, 8, 4)  # DeepSeek-V3
    ok("DeepSeekV3", 512, 22)
    for bad in (
        ("DeepSeekV3", 256, 9),
        ("DeepSeekV3", 255, 8),
        ("Renormalize", 128, 8, 8, 4),
        ("Llama4", 128, 2),
        ("DeepSeekV3", 256, 8, 3, 1),
        ("DeepSeekV3", 256, 8, 8, 5),
        ("Nonsense", 8, 2),
    ):
        with pytest.raises(ContractError):
            ok(*bad)


def test_shard_divisibility_of_glm_45_air() -> None:
    air = MoEShape(4096, 1408, 128, 8)
    contract.check_shard(air, 1)
    with pytest.raises(ContractError, match=r"704.*TP in \[1\]"):
        contract.check_shard(air, 2)
    contract.check_shard(MoEShape(5120, 1536, 160, 8), 4)
    with pytest.raises(ContractError, match="192"):
        contract.check_shard(MoEShape(5120, 1536, 160, 8), 8)


def test_values_of_scales_and_weights() -> None:
    contract.check_values(case.fp8_record(0))
    contract.check_values(case.nvfp4_record(0))
    dead = case.fp8_record(0)
    dead.w13_scale[3, 1, 0] = 1e-23
    with pytest.raises(ContractError, match=r"layer 4 w13_scale\[3, 1, 0\].*1e-10"):
        contract.check_values(dead, 4)
    broken = case.nvfp4_record(0)
    broken.w13_scale_2[2, 1] = float("nan")  # a half that was never filled
    with pytest.raises(ContractError, match=r"w13_scale_2\[2, 1\]"):
        contract.check_values(broken)
    overflow = case.fp8_record(0)
    overflow.w2.view(torch.uint8)[1, 2, 3] = 0x7F
    with pytest.raises(ContractError, match="NaN"):
        contract.check_values(overflow)


def test_mx_scales_may_be_the_least_but_never_nan() -> None:
    """Byte 0 is 2^-127, the scale of an all-zero group; 255 is NaN."""
    from tests.kernels.records import bf16_record, quantised

    for fmt in ("mxfp8", "mxfp4", "fp8_channel", "fp8_tensor"):
        record = quantised(bf16_record(2, 64, 32), fmt)  # type: ignore[arg-type]
        contract.check_values(record)
        assert record.w13_scale is not None
        if fmt.startswith("mx"):
            record.w13_scale[1, 3, 0] = 0
            contract.check_values(record)
            record.w13_scale[1, 3, 0] = 255
            with pytest.raises(ContractError, match=r"w13_scale\[1, 3, 0\]"):
                contract.check_values(record)
        else:
            record.w13.view(torch.uint8)[1, 0, 0] = 0x7F
            with pytest.raises(ContractError, match="w13"):
                contract.check_values(record)
