"""Reference and emulated variants: maths, options, refusals and the override points of fault injection."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from moe_kernels.errors import VariantError
from moe_kernels.numerics import assert_bitwise_equal, calc_diff, relative_l2
from moe_kernels.quant import fp8
from moe_kernels.records import Routing, RoutingConfig
from moe_kernels.registry import parse
from moe_kernels.variants.emulated import Fp8EmulatedLayer, NvFp4EmulatedLayer, Quantized
from moe_kernels.variants.weights import BUDGET, CACHE_VARIABLE, expert_matrices
from tests.kernels.records import bf16_record, make_layer, quantised

CONFIG = RoutingConfig(8, 3, routed_scaling_factor=2.5)
SHAPES = [(256, 128), (128, 256), (144, 80)]  # the last: both ragged for FP8's 128
MX_SHAPES = [(256, 128), (128, 256), (160, 96)]
OTHERS = ["mxfp8", "mxfp4", "fp8_channel", "fp8_tensor"]
VARIANTS = ["bf16/reference", "fp8/reference", "nvfp4/reference", "fp8/emulated", "nvfp4/emulated"]
EVERY = [*VARIANTS, "nvfp4/emulated:input_scale=expert", "mxfp4/emulated:act=mxfp4", "mxfp4/emulated:act=bf16",
         *(f"{f}/{b}" for f in OTHERS for b in ("reference", "emulated"))]


def _record(variant: str, hidden: int = 256, inter: int = 128, limit: float | None = None):
    return quantised(bf16_record(8, hidden, inter, limit=limit), parse(variant).format)


def _inputs(tokens: int, hidden: int = 256, dtype: torch.dtype = torch.float32, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, hidden, generator=g).to(dtype), torch.randn(tokens, 8, generator=g)


def _dense_fp64(record, hidden: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Every expert on every token in FP64, weighted by a dense [T, E] matrix."""
    w13 = torch.stack([expert_matrices(record, e, "w13") for e in range(8)]).double()
    w2 = torch.stack([expert_matrices(record, e, "w2") for e in range(8)]).double()
    gate, up = torch.einsum("th,enh->ten", hidden.double(), w13).chunk(2, dim=-1)
    if record.swiglu_limit is not None:
        gate, up = gate.clamp(max=record.swiglu_limit), up.clamp(-record.swiglu_limit, record.swiglu_limit)
    weight = torch.zeros(hidden.shape[0], 8, dtype=torch.float64).scatter(1, routing.ids, routing.weights.double())
    return torch.einsum("ten,ehn,te->th", gate * gate.sigmoid() * up, w2, weight)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("shape", MX_SHAPES)
@pytest.mark.parametrize("fmt", OTHERS)
def test_other_references_are_the_dense_sum(
    fmt: str, shape: tuple[int, int], tokens: int, limit: float | None
) -> None:
    test_reference_is_the_dense_sum(f"{fmt}/reference", shape, tokens, limit)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("tokens", [1, 3, 5, 7, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_reference_is_the_dense_sum(variant: str, shape: tuple[int, int], tokens: int, limit: float | None) -> None:
    record = _record(variant, *shape, limit=limit)
    hidden, logits = _inputs(tokens, shape[0])
    out, routing = make_layer(variant, record, CONFIG).forward(hidden, logits)
    # FP32 sums of at most 256 terms: relative error far below 256 * 2^-24 = 1.5e-5
    assert relative_l2(out, _dense_fp64(record, hidden, routing)) < 2e-6
    assert out.dtype == torch.float32


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_oracle_ignores_the_model_dtype_until_the_end(fmt: str) -> None:
    record = _record(f"{fmt}/reference")
    hidden, logits = _inputs(5, dtype=torch.bfloat16)
    layer = make_layer(f"{fmt}/reference", record, CONFIG)
    out, _ = layer.forward(hidden, logits)
    assert_bitwise_equal(out, layer.forward(hidden.float(), logits)[0].bfloat16())


def test_bf16_reference_in_bf16_is_what_transformers_computes() -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

    record = _record("bf16/reference")
    experts = Glm4MoeExperts(Glm4MoeConfig(
        hidden_size=256, moe_intermediate_size=128, n_routed_experts=8, hidden_act="silu"))
    experts.gate_up_proj.data, experts.down_proj.data = record.w13, record.w2
    experts.config._experts_implementation = "eager"
    hidden, logits = _inputs(33, dtype=torch.bfloat16)
    out, routing = make_layer("bf16/reference", record, CONFIG).forward(hidden, logits)
    with torch.no_grad():
        stock = experts(hidden, routing.ids, routing.weights)
    # stock adds k=3 expert outputs in BF16, we in FP32: up to 3 roundings of 2^-9 per element
    assert relative_l2(out, stock) < 3 * 2**-9
    exact = _dense_fp64(record, hidden, routing)
    assert relative_l2(out, exact) <= relative_l2(stock, exact)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", *OTHERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_reference_takes_any_format(fmt, dtype: torch.dtype) -> None:
    hidden_size, inter = (160, 96) if fmt.startswith("mx") else (144, 80)
    record = _record(f"{fmt}/reference", hidden_size, inter)
    w13, w2 = (torch.stack([expert_matrices(record, e, w) for e in range(8)]).bfloat16() for w in ("w13", "w2"))
    plain = dataclasses.replace(record, format="bf16", w13=w13, w2=w2)
    hidden, logits = _inputs(7, hidden_size, dtype)
    ours = make_layer("bf16/reference", record, CONFIG).forward(hidden, logits)[0]
    assert_bitwise_equal(ours, make_layer("bf16/reference", plain, CONFIG).forward(hidden, logits)[0])


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_emulation_is_near_the_oracle(fmt: str, shape: tuple[int, int]) -> None:
    """calc_diff is half the squared relative error. One E4M3 rounding: (2^-3)^2 / 12 times the mean of 1/m^2 over
    mantissas 1..2, 1/2: 6.5e-4; three of them (gate, up, intermediate) make 1e-3. E2M1 has a spacing 4 times as
    wide: 16 times that.
    """
    record = _record(f"{fmt}/reference", *shape)
    hidden, logits = _inputs(64, shape[0])
    exact = make_layer(f"{fmt}/reference", record, CONFIG).forward(hidden, logits)[0]
    diff = calc_diff(make_layer(f"{fmt}/emulated", record, CONFIG).forward(hidden, logits)[0], exact)
    assert (5e-4 < diff < 1.5e-3) if fmt == "fp8" else (8e-3 < diff < 2.5e-2)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_copied_scales_are_bit_equal_to_direct_ones(shape: tuple[int, int], tokens: int) -> None:
    record = _record("fp8/emulated", *shape)
    hidden, logits = _inputs(tokens, shape[0], torch.bfloat16)
    direct, copied = (make_layer(f"fp8/emulated{o}", record, CONFIG) for o in ("", ":scales=copied"))
    assert_bitwise_equal(copied.forward(hidden, logits)[0], direct.forward(hidden, logits)[0])
    one, other = direct.quantize_input(hidden), copied.quantize_input(hidden)
    assert_bitwise_equal(one.scale, other.scale)
    assert_bitwise_equal(one.q, other.q)
    assert one.scale.shape == (-(-shape[0] // 128), tokens) and one.scale.is_contiguous()


def test_copied_scales_really_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = fp8.quantize_activations
    monkeypatch.setattr(fp8, "quantize_activations", lambda x, **kw: (asked.append(kw["layout"]), real(x, **kw))[1])
    hidden, _ = _inputs(5)
    for option in (":scales=copied", ""):
        make_layer(f"fp8/emulated{option}", _record("fp8/emulated"), CONFIG).quantize_input(hidden)
    assert asked == ["row", "column"]


@pytest.mark.parametrize("variant", [v for v in EVERY if ":" not in v])
def test_bf16_bias_changes_routing_only(variant: str) -> None:
    record, bias = _record(variant), torch.linspace(6.9, 7.1, 8)
    hidden, logits = _inputs(200)
    plain, rounded = (make_layer(f"{variant}{o}", record, CONFIG, bias) for o in ("", ":bias=bf16"))
    assert plain.resolved() == variant and rounded.resolved() == f"{variant}:bias=bf16"
    a, b = plain.route(logits), rounded.route(logits)
    same = (a.ids.sort(-1).values == b.ids.sort(-1).values).all(-1)
    assert 0 < same.sum() < 200
    assert_bitwise_equal(plain.experts(hidden, b), rounded.experts(hidden, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", EVERY)
def test_no_cache_gives_the_same_bits(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden_size, inter = (160, 96) if variant.startswith("mx") else (144, 80)
    record = _record(variant, hidden_size, inter)
    for tokens in (1, 5, 33):
        hidden, logits = _inputs(tokens, hidden_size, dtype)
        cached = make_layer(variant, record, CONFIG).forward(hidden, logits)[0]
        with monkeypatch.context() as patch:
            patch.setenv(CACHE_VARIABLE, "0")
            layer = make_layer(variant, record, CONFIG)
            assert_bitwise_equal(layer.forward(hidden, logits)[0], cached)


def test_cache_budget_is_shared_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    record = _record("fp8/reference")
    size = 4 * (record.w13.numel() + record.w2.numel())
    before = BUDGET.used
    monkeypatch.setenv(CACHE_VARIABLE, str((before + 1.5 * size) / 1e9))
    first = make_layer("fp8/reference", record, CONFIG)
    second = make_layer("fp8/reference", record, CONFIG)
    kept = [isinstance(w, torch.Tensor) for layer in (first, second) for w in (layer._w13, layer._w2)]
    assert kept == [True, True, False, True]  # w2 is half of w13 and still fits
    assert BUDGET.used == before + size + 4 * record.w2.numel()
    del first, second
    import gc

    gc.collect()
    assert BUDGET.used == before
    for wrong in ("lots", "-1", "nan"):
        monkeypatch.setenv(CACHE_VARIABLE, wrong)
        with pytest.raises(VariantError, match=CACHE_VARIABLE):
            make_layer("fp8/reference", record, CONFIG)


@pytest.mark.parametrize("variant", EVERY)
def test_inputs_stay_and_runs_repeat(variant: str) -> None:
    hidden, logits = _inputs(17, dtype=torch.bfloat16)
    layer, copy = make_layer(variant, _record(variant), CONFIG), (hidden.clone(), logits.clone())
    first = layer.forward(hidden, logits)[0]
    assert first.dtype == torch.bfloat16 and first.shape == hidden.shape
    for _ in range(5):
        assert_bitwise_equal(layer.forward(hidden, logits)[0], first)
    assert_bitwise_equal(hidden, copy[0])
    assert_bitwise_equal(logits, copy[1])


@pytest.mark.parametrize("variant", EVERY)
def test_no_tokens(variant: str) -> None:
    out, routing = make_layer(variant, _record(variant), CONFIG).forward(torch.empty(0, 256), torch.empty(0, 8))
    assert out.shape == (0, 256) and routing.ids.shape == (0, 3)


@pytest.mark.parametrize("variant", EVERY)
def test_zero_tokens_of_value_zero_give_zero(variant: str) -> None:
    """An all-zero row has zero groups: no 0/0 anywhere."""
    hidden, logits = _inputs(5)
    hidden[2] = 0
    out = make_layer(variant, _record(variant), CONFIG).forward(hidden, logits)[0]
    assert out.isfinite().all() and (out[2] == 0).all() and (out[1] != 0).any()


def test_wrong_format_and_reduced_precision_are_refused() -> None:
    for variant in (v for v in EVERY if not v.startswith("bf16")):
        with pytest.raises(VariantError, match="these are bf16"):
            make_layer(variant, bf16_record(8, 256, 128), CONFIG)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(VariantError, match="float32_matmul_precision"):
            make_layer("fp8/emulated", _record("fp8/emulated"), CONFIG)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_gate_and_up_keep_their_own_scalar() -> None:
    """Gate's scalar used for both halves (a real bug elsewhere) is far from right; ours follows the record."""
    record = _record("nvfp4/emulated")
    hidden, logits = _inputs(9)
    exact = make_layer("nvfp4/reference", record, CONFIG).forward(hidden, logits)[0]
    one = dataclasses.replace(record, w13_scale_2=record.w13_scale_2[:, :1].expand(-1, 2).contiguous())
    assert calc_diff(make_layer("nvfp4/emulated", record, CONFIG).forward(hidden, logits)[0], exact) < 3e-2
    assert calc_diff(make_layer("nvfp4/emulated", one, CONFIG).forward(hidden, logits)[0], exact) > 0.2


def test_nvfp4_input_scale_is_the_largest_of_the_layer() -> None:
    record = _record("nvfp4/emulated")
    layer = make_layer("nvfp4/emulated", record, CONFIG)
    assert isinstance(layer, NvFp4EmulatedLayer)
    assert layer.input_scale == record.w13_input_scale.max() and layer.intermediate_scale == record.w2_input_scale.max()
    flat = dataclasses.replace(
        record, w13_input_scale=torch.full((8, 2), record.w13_input_scale.max().item()),
        w2_input_scale=torch.full((8,), record.w2_input_scale.max().item()))
    hidden, logits = _inputs(7)
    assert_bitwise_equal(
        layer.forward(hidden, logits)[0], make_layer("nvfp4/emulated", flat, CONFIG).forward(hidden, logits)[0])


def test_nvfp4_input_scale_per_expert_is_another_number() -> None:
    """Every expert under its own scalar: the same as one layer per expert whose only scalar it is."""
    record = _record("nvfp4/emulated")
    hidden, logits = _inputs(9)
    config = RoutingConfig(8, 1)
    layer = make_layer("nvfp4/emulated:input_scale=expert", record, config)
    out, routing = layer.forward(hidden, logits)
    for token, (expert,) in enumerate(routing.ids.tolist()):
        one = dataclasses.replace(
            record, w13_input_scale=record.w13_input_scale[expert].expand(8, 2).contiguous(),
            w2_input_scale=record.w2_input_scale[expert].expand(8).contiguous())
        alone = make_layer("nvfp4/emulated", one, config).forward(hidden[token : token + 1], logits[token : token + 1])
        assert_bitwise_equal(out[token : token + 1], alone[0])
    largest = make_layer("nvfp4/emulated", record, config).forward(hidden, logits)[0]
    assert 1e-4 < calc_diff(out, largest) < 3e-2
    record.w13_input_scale = record.w2_input_scale = None  # then both mean: each token its own
    same = [make_layer(f"nvfp4/emulated{o}", record, config).forward(hidden, logits)[0]
            for o in ("", ":input_scale=expert")]
    assert_bitwise_equal(*same)


@pytest.mark.parametrize("variant", [v for v in EVERY if "/emulated" in v])
def test_swiglu_limit_reaches_every_emulation(variant: str) -> None:
    hidden, logits = _inputs(7)
    free, bound = (make_layer(variant, _record(variant, limit=limit), CONFIG).forward(hidden, logits)[0]
                   for limit in (None, 0.5))
    assert calc_diff(free, bound) > 1e-2
    exact = make_layer(variant.partition("/")[0] + "/reference", _record(variant, limit=0.5), CONFIG)
    assert calc_diff(bound, exact.forward(hidden, logits)[0]) < 0.12  # mxfp4 activations: 0.08


def test_nvfp4_without_input_scale_scales_each_token_by_itself() -> None:
    record = dataclasses.replace(_record("nvfp4/emulated"), w13_input_scale=None, w2_input_scale=None)
    layer = make_layer("nvfp4/emulated", record, CONFIG)
    hidden, logits = _inputs(6)
    out = layer.forward(hidden, logits)[0]
    exact = make_layer("nvfp4/reference", record, CONFIG).forward(hidden, logits)[0]
    assert calc_diff(out, exact) < 3e-2
    hidden[1] *= 1e4  # a neighbour's outlier must not matter
    again = layer.forward(hidden, logits)[0]
    assert_bitwise_equal(again[[0, 2, 3, 4, 5]], out[[0, 2, 3, 4, 5]])
    assert calc_diff(again[1], make_layer("nvfp4/reference", record, CONFIG).forward(hidden, logits)[0][1]) < 3e-2


def test_gemm1_output_can_be_stored_as_fp8() -> None:
    """The TRT-LLM path's extra rounding: further from the oracle, each half with scales of its own."""

    class Stored(Fp8EmulatedLayer):
        gemm1_output = "fp8"

    record, spec = _record("fp8/emulated", 144, 80), parse("fp8/emulated")
    hidden, logits = _inputs(64, 144)
    exact = make_layer("fp8/reference", record, CONFIG).forward(hidden, logits)[0]
    plain = Fp8EmulatedLayer(record, CONFIG, torch.zeros(8), spec)
    stored = Stored(record, CONFIG, torch.zeros(8), spec)
    routing = plain.route(logits)
    exact = make_layer("fp8/reference", record, CONFIG).experts(hidden, routing)
    less, more = calc_diff(plain.experts(hidden, routing), exact), calc_diff(stored.experts(hidden, routing), exact)
    assert 1.2 * less < more < 3 * less


def _break_route(layer):
    return lambda logits: Routing((r := type(layer).route(layer, logits)).ids, r.weights / 2.5)


def _break_scales(layer):
    """Row-major scales read as column-major, as a kernel without a stride check would."""

    def broken(hidden):
        q, scale = fp8.quantize_activations(hidden, layout="row")
        return Quantized(q, scale.view(-1).view(scale.shape[1], scale.shape[0]))

    return broken


FAULTS = {
    "route": _break_route,
    "quantize_input": _break_scales,
    "gemm1": lambda layer: lambda x, plan: torch.cat(type(layer).gemm1(layer, x, plan).chunk(2, -1)[::-1], -1),
    "activation": lambda layer: lambda g: F.gelu(g.chunk(2, -1)[0]) * g.chunk(2, -1)[1],
    "quantize_intermediate": lambda layer: lambda h, plan: type(layer).quantize_intermediate(layer, h.roll(1, 0), plan),
    "gemm2": lambda layer: lambda x, plan: type(layer).gemm2(layer, x, plan).roll(1, -1),
    "combine": lambda layer: lambda rows, routing, plan: rows[plan.slot_row].sum(1),
}


@pytest.mark.parametrize("step", FAULTS)
def test_every_step_can_be_replaced(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("fp8/emulated", _record("fp8/emulated"), CONFIG)
    hidden, logits = _inputs(7)
    right = layer.forward(hidden, logits)[0]
    monkeypatch.setattr(layer, step, FAULTS[step](layer))
    assert calc_diff(layer.forward(hidden, logits)[0], right) > 1e-3


def test_matrices_can_be_replaced() -> None:
    """Faults of the weights (here: w2's scale blocks reversed) go through `matrix`."""

    class Reversed(Fp8EmulatedLayer):
        def matrix(self, record, expert, which):
            if which == "w2":
                record = dataclasses.replace(record, w2_scale=record.w2_scale.flip(1))
            return super().matrix(record, expert, which)

    source = bf16_record(8, 256, 128)
    source.w2[:, :128] *= 4  # else every block has about the same scale and the order hardly matters
    record, spec = quantised(source, "fp8"), parse("fp8/emulated")
    hidden, logits = _inputs(7)
    bias = torch.linspace(6.8, 7.0, 8)
    right = Fp8EmulatedLayer(record, CONFIG, bias, spec).forward(hidden, logits)[0]
    assert calc_diff(Reversed(record, CONFIG, bias, spec).forward(hidden, logits)[0], right) > 1e-2
