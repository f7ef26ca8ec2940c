"""inspect: every reported number against a direct computation on the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_kernels.inspect import bf16_step, inspect_checkpoint
from moe_kernels.quantize import quantize
from tests.kernels.damage import rewrite


@pytest.fixture(scope="module")
def nvfp4(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(tiny_checkpoint, tmp_path_factory.mktemp("c") / "nvfp4", "nvfp4")


def test_families_add_up(tiny_checkpoint: Path) -> None:
    report = inspect_checkpoint(tiny_checkpoint)
    stored = load_file(tiny_checkpoint / "model.safetensors")
    assert sum(f.count for f in report.families) == len(stored)
    assert sum(f.nbytes for f in report.families) == sum(t.nbytes for t in stored.values()) == report.nbytes
    assert report.parameters == sum(t.numel() for t in stored.values())
    found = {f.pattern: f for f in report.families}
    experts = found["model.layers.*.mlp.experts.*.gate_proj.weight"]
    assert (experts.count, experts.dtype, experts.shape, experts.nbytes) == (16, "BF16", (128, 128), 16 * 2 * 128 * 128)
    assert report.weights_sha256 is None and report.nvfp4 == report.fp8 == ()


@pytest.mark.parametrize("value", [6.95, 34.5, 11.2, 1.0, 0.0301, -7.9999])
def test_bf16_step(value: float) -> None:
    here = torch.tensor(value, dtype=torch.bfloat16)
    bits = here.view(torch.int16)
    above = (bits + 1).view(torch.bfloat16)  # the next larger magnitude
    if abs(here.item()) >= 8 > abs(value):  # rounded up into the next binade
        above = (bits - 1).view(torch.bfloat16)
    assert bf16_step(value) == abs(above.item() - here.item())
    assert bf16_step(0.0) == 0.0


def test_bias_report(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def shift(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.1.mlp.gate.e_score_correction_bias"] += 6.94
        t["model.layers.2.mlp.gate.e_score_correction_bias"] = torch.arange(8) / 8.0

    path = rewrite(tiny_checkpoint, tmp_path / "m", shift)
    bias = load_file(path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    first, second = inspect_checkpoint(path).bias
    assert (first.low, first.high) == (bias.min().item(), bias.max().item())
    assert first.bf16_step == 2.0**-5 and first.distinct == 8
    assert first.distinct_bf16 == len(set(bias.bfloat16().tolist())) < 8
    assert 0.0 < first.sets_changed < 1.0
    assert second.distinct == second.distinct_bf16 == 8 and second.sets_changed == 0.0  # BF16 numbers already


def test_nvfp4_report(nvfp4: Path, tmp_path: Path) -> None:
    stored = load_file(nvfp4 / "model.safetensors")
    for report, layer in zip(inspect_checkpoint(nvfp4).nvfp4, (1, 2), strict=True):
        name = f"model.layers.{layer}.mlp.experts.{{}}.{{}}_proj.weight_scale_2"
        pairs = [tuple(stored[name.format(e, half)].item() for half in ("gate", "up")) for e in range(8)]
        assert report.layer == layer and report.experts == 8
        assert report.mismatched == sum(g != u for g, u in pairs)
        assert report.max_ratio == pytest.approx(max(max(p) / min(p) for p in pairs), rel=1e-6)
        assert (report.input_scale_low, report.input_scale_high) == (0.25, 1.0)

    def synchronise(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            if name.endswith("up_proj.weight_scale_2"):
                t[name] = t[name.replace("up_proj", "gate_proj")].clone()
            elif name.endswith("input_scale"):
                t[name] = torch.tensor(0.5)
        t["model.layers.1.mlp.experts.4.up_proj.weight_scale_2"] *= 10
        t["model.layers.2.mlp.experts.0.gate_proj.weight_scale_2"].zero_()

    one, two = inspect_checkpoint(rewrite(nvfp4, tmp_path / "m", synchronise)).nvfp4
    assert one.mismatched == 1 and one.max_ratio == pytest.approx(10, rel=1e-6)
    assert two.mismatched == 1 and two.max_ratio == float("inf") and two.zero_scales == 1
    assert json.dumps(inspect_checkpoint(tmp_path / "m").to_json()).count('"inf"') == 1


def test_fp8_report_finds_dead_experts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = quantize(tiny_checkpoint, tmp_path / "a", "fp8")
    name = "model.layers.2.mlp.experts.{}.{}_proj.weight_scale_inv"

    def kill(t: dict[str, torch.Tensor]) -> None:
        t[name.format(5, "down")].fill_(1e-23)
        t[name.format(1, "gate")].zero_()

    alive, dead = inspect_checkpoint(rewrite(path, tmp_path / "m", kill)).fp8
    assert alive.tiny == 0 and alive.tiny_experts == () and alive.low > 1e-6
    assert dead.tiny == 2 and dead.tiny_experts == (1, 5) and dead.low == 0.0
    stored = load_file(path / "model.safetensors")
    assert alive.high == max(t.max().item() for n, t in stored.items() if "layers.1." in n and n.endswith("_inv"))
    zero = rewrite(tiny_checkpoint, tmp_path / "z", lambda t: t["model.layers.1.mlp.experts.2.up_proj.weight"].zero_())
    ours = inspect_checkpoint(quantize(zero, tmp_path / "za", "fp8")).fp8[0]
    assert ours.low == pytest.approx(1e-10) and ours.tiny == 0  # our quantiser never writes a smaller one


def test_mtp_is_reported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = rewrite(
        tiny_checkpoint, tmp_path / "m", lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(4, 4)}),
        lambda c: c.update(num_nextn_predict_layers=1),
    )  # fmt: skip
    report = inspect_checkpoint(path)
    assert report.mtp_layers == (3,) and report.mtp_tensors == 1
    (family,) = [f for f in report.families if f.note]
    assert family.pattern == "model.layers.3.eh_proj.weight" and family.note == "MTP, skipped"


def test_the_mini_checkpoint(mini_checkpoint: Path) -> None:
    report = inspect_checkpoint(mini_checkpoint)
    assert report.num_experts == 16 and report.top_k == 4 and report.moe_layers == (1, 2, 3, 4, 5)
    assert all(b.bf16_step == 0.03125 and 6.5 < b.low < b.high < 7.1 for b in report.bias)  # design.md section 7


# ---- hazards, and every format


def codes(path: Path) -> dict[str, str]:
    return {w.code: w.message for w in inspect_checkpoint(path).warnings}


def test_a_clean_checkpoint_has_no_warnings_but_the_bias(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def exact(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith("e_score_correction_bias")]:
            t[name] = torch.arange(8) / 8.0

    clean = rewrite(tiny_checkpoint, tmp_path / "clean", exact)
    assert codes(clean) == {}
    assert codes(quantize(clean, tmp_path / "fp8", "fp8")) == {}
    shifted = rewrite(tiny_checkpoint, tmp_path / "bias", lambda t: t.update(
        {n: v + 6.94 for n, v in t.items() if n.endswith("e_score_correction_bias")}))
    message = codes(shifted)["bias-step"]
    worst = max(inspect_checkpoint(shifted).bias, key=lambda b: b.sets_changed)
    assert "BF16's step 0.03125" in message and f"{worst.distinct} values become {worst.distinct_bf16}" in message
    assert f"{worst.sets_changed:.0%}" in message and "2 of 2 layers" in message


def test_gate_and_up_mismatch_with_share_and_ratio(nvfp4: Path, tmp_path: Path) -> None:
    def one(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith("up_proj.weight_scale_2")]:
            t[name] = t[name.replace("up_proj", "gate_proj")].clone()
        t["model.layers.1.mlp.experts.4.up_proj.weight_scale_2"] *= 10

    message = codes(rewrite(nvfp4, tmp_path / "m", one))["gate-up-scale"]
    assert "1 of 16 experts (6.2%), by up to 10.000x" in message


def test_gate_and_up_of_per_tensor_fp8(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = quantize(tiny_checkpoint, tmp_path / "h", "fp8_tensor")
    stored = load_file(path / "model.safetensors")
    name = "model.layers.{}.mlp.experts.{}.{}_proj.weight_scale"
    pairs = [[stored[name.format(i, e, h)].item() for h in ("gate", "up")] for i in (1, 2) for e in range(8)]
    worst, different = max(max(p) / min(p) for p in pairs), sum(g != u for g, u in pairs)
    assert f"{different} of 16 experts" in codes(path)["gate-up-scale"]
    assert max(r.max_ratio for r in inspect_checkpoint(path).fp8) == pytest.approx(worst, rel=1e-6)
    report = inspect_checkpoint(path).fp8[0]
    assert (report.input_scale_low, report.input_scale_high, report.dtype) == (2.0, 8.0, "F32")


def test_dead_experts_missing_and_spread_input_scales(nvfp4: Path, tmp_path: Path) -> None:
    assert "no-input-scale" not in codes(nvfp4) and "input-scale-spread" not in codes(nvfp4)

    def strip(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith("input_scale")]:
            del t[name]
        t["model.layers.2.mlp.experts.6.down_proj.weight_scale_2"].fill_(1e-23)

    found = codes(rewrite(nvfp4, tmp_path / "1", strip))
    assert "without input_scale" in found["no-input-scale"] and "layer 2: experts 6" in found["dead-experts"]

    def spread(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.1.mlp.experts.3.down_proj.input_scale"] *= 7

    assert "7.0x between experts (layer 1)" in codes(rewrite(nvfp4, tmp_path / "2", spread))["input-scale-spread"]
    zero = rewrite(nvfp4, tmp_path / "3", lambda t: t["model.layers.1.mlp.experts.0.up_proj.input_scale"].zero_())
    assert "input_scale is 0 in layers 1" in codes(zero)["no-input-scale"]


def test_e8m0_where_fp32_is_expected(tiny_checkpoint: Path, tmp_path: Path) -> None:
    fp8 = quantize(tiny_checkpoint, tmp_path / "fp8", "fp8")

    def powers(t: dict[str, torch.Tensor]) -> None:
        t.update({n: torch.exp2(torch.log2(v).round()) for n, v in t.items() if n.endswith("_scale_inv")})

    def stored(t: dict[str, torch.Tensor]) -> None:
        powers(t)
        t.update({n: v.to(torch.float8_e8m0fnu) for n, v in t.items() if n.endswith("_scale_inv")})

    assert "e8m0-scales" not in codes(fp8)
    assert "every FP32 block scale is a power of two" in codes(rewrite(fp8, tmp_path / "1", powers))["e8m0-scales"]
    assert "stored as E8M0 exponents (F8_E8M0)" in codes(rewrite(fp8, tmp_path / "2", stored))["e8m0-scales"]


def test_weight_only_swiglu_limit_and_kv_cache(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = quantize(tiny_checkpoint, tmp_path / "c", "nvfp4_w4a16")
    changed = rewrite(path, tmp_path / "m", lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(())}),
                      lambda c: c.update(swiglu_limit=10.0))
    file = changed / "hf_quant_config.json"
    content = json.loads(file.read_text())
    content["quantization"]["kv_cache_quant_algo"] = "FP8"
    file.write_text(json.dumps(content))
    found = codes(changed)
    assert "nvfp4/reference does not" in found["weight-only"] and "clamped at 10" in found["swiglu-limit"]
    assert "declares a FP8 KV cache, 1 scales of it ignored" in found["kv-scales"]


@pytest.mark.parametrize("layout", ["fp8_channel", "nvfp4_mixed", "nvfp4_ct", "mxfp4", "mxfp8", "fp8_pb_wo"])
def test_every_format_is_explained(
    layout: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_kernels.cli import main
    from moe_kernels.formats.targets import TARGETS

    path = quantize(tiny_checkpoint, tmp_path / "m", layout)
    report = inspect_checkpoint(path)
    experts, *others = report.kinds
    assert (experts.kind, experts.modules) == ("routed experts", 48)
    assert experts.label == TARGETS[layout].encoding.label
    dense = {k.label for k in others if k.kind == "dense MLP"}
    assert dense == ({"ModelOpt per-tensor FP8 (format H)"} if layout == "nvfp4_mixed" else {"BF16"})
    assert {k.kind for k in others} == {"attention", "dense MLP", "shared experts", "lm_head"}
    stored = load_file(path / "model.safetensors")
    if report.fp8:
        scales = [t for n, t in stored.items() if "layers.1.mlp.experts" in n and n.endswith("weight_scale")]
        values = torch.cat([t.flatten() for t in scales])
        values = 2.0 ** (values.double() - 127) if values.dtype == torch.uint8 else values.double()
        assert (report.fp8[0].low, report.fp8[0].high) == (values.min().item(), values.max().item())
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "routed experts" in shown and experts.label.split(" (")[0] in shown
