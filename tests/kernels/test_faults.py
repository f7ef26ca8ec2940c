"""Fault injection: every fault can be switched on and off again, and kernel parity sees what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_kernels.capture import moe_blocks
from moe_kernels.check import QUICK_SWEEP, CheckReport, Reference, check_model, compare_layer, references
from moe_kernels.errors import VariantError
from moe_kernels.faults import all_faults, fault, inject
from moe_kernels.hf import load_model
from tests.tiny import glm4_moe

FAULTS = all_faults()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """A tiny random model per format with what the faults act on: biases near 6.94, factor 2.5, a shared expert."""
    path = glm4_moe(
        tmp_path_factory.mktemp("faults") / "model",
        hidden_size=256,
        moe_intermediate_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        n_routed_experts=16,
        num_experts_per_tok=4,
    )
    from safetensors.torch import load_file, save_file

    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            spread = torch.linspace(-0.12, 0.12, tensors[name].numel())
            tensors[name] = 6.94 + spread[torch.randperm(spread.numel(), generator=torch.Generator().manual_seed(3))]
    save_file(tensors, file, metadata={"format": "pt"})
    ids = torch.randint(2, 500, (160,), generator=torch.Generator().manual_seed(1)).tolist()
    out = {}
    for fmt in ("fp8", "nvfp4"):
        loaded = load_model(path, f"{fmt}/emulated")
        out[fmt] = loaded, references(loaded, ids)
    return out


def quick(models, fmt: str) -> CheckReport:
    loaded, refs = models[fmt]
    return check_model(loaded, refs, QUICK_SWEEP)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_the_sound_kernel_passes_and_repeats_bit_for_bit(models, fmt: str) -> None:
    report = quick(models, fmt)
    assert report.ok, report.failed()
    parity = [f for f in report.findings if f.probe == "parity" and f.detail == "against the emulation"]
    assert parity and all(f.value == 0.0 for f in parity)


def test_a_reference_is_held_to_the_oracle_alone(models) -> None:
    """It does not quantise activations, so the emulation (NVFP4: 1e-2 away) is no measure of it."""
    emulated, _ = models["nvfp4"]
    ids = torch.randint(2, 500, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    loaded = load_model(emulated.path, "nvfp4/reference")
    own = references(loaded, ids)
    report = check_model(loaded, own, QUICK_SWEEP)
    assert report.ok, report.failed()
    assert {f.detail for f in report.findings if f.probe == "parity"} == {"against the oracle"}
    layer = moe_blocks(loaded.model)[1].layer
    sound = layer.forward
    layer.forward = lambda hidden, logits: (2.5 * sound(hidden, logits)[0], sound(hidden, logits)[1])
    failed = check_model(loaded, own, QUICK_SWEEP).failed()
    assert {"parity", "zero-block", "extreme-logits"} <= {f.probe for f in failed} and {f.layer for f in failed} == {1}


KERNEL_FAULTS = [f for f in FAULTS if f.harmful and "kernel" in f.expected]


@pytest.mark.parametrize("name", [f.name for f in KERNEL_FAULTS])
def test_kernel_parity_catches(models, name: str) -> None:
    fmt = fault(name).formats[0]
    loaded, _ = models[fmt]
    with inject(loaded, name):
        assert not quick(models, fmt).ok
    loaded_again = quick(models, fmt) if name in ("bias_bf16", "w13_swapped") else None
    assert loaded_again is None or loaded_again.ok  # leaving the context removes the fault


@pytest.mark.parametrize("name", [f.name for f in FAULTS if not f.harmful])
def test_benign_changes_pass(models, name: str) -> None:
    fmt = fault(name).formats[0]
    loaded, _ = models[fmt]
    with inject(loaded, name):
        report = quick(models, fmt)
    assert report.ok, report.failed()


@pytest.mark.parametrize("name", ["shared_dropped", "shared_doubled", "shared_scaled", "rope_bf16"])
def test_faults_outside_the_kernel_change_the_model_and_vanish(models, name: str) -> None:
    loaded, _ = models["fp8"]
    ids = torch.arange(2, 130)[None]

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return loaded.model(ids).logits

    before = logits()
    with inject(loaded, name):
        changed = logits()
    assert not torch.equal(changed, before)
    assert torch.equal(logits(), before)


def test_flashinfers_gate_passes_what_ours_catches(models) -> None:
    """kernels.md 5.5: a rule that scales its slack by the tested value misses a BF16 bias and others."""
    loaded, _ = models["fp8"]
    missed = []
    for name in ("bias_bf16", "w2_blocks_reversed", "noise_10", "act_ue8m0_after", "batch_dependent"):
        with inject(loaded, name):
            report = quick(models, "fp8")
        assert not report.ok
        if report.isclose_share >= 0.79:
            missed.append(name)
    assert "bias_bf16" in missed and len(missed) >= 3, missed


def test_catalogue_is_covered_and_sourced() -> None:
    rows = {f.row for f in FAULTS if f.row}
    assert len(rows) >= 30
    assert all(f.source and f.summary for f in FAULTS)
    hooks = [(f.layer, f.record, f.shared, f.model, f.engine) for f in FAULTS]
    assert all(sum(h is not None for h in hook) == 1 for hook in hooks)


def test_unknown_faults_and_wrong_variants_are_refused(models) -> None:
    loaded, _ = models["fp8"]
    with pytest.raises(VariantError, match="unknown fault 'nope'"), inject(loaded, "nope"):
        pass
    with pytest.raises(VariantError, match="nvfp4/emulated"), inject(loaded, "one_scalar"):
        pass


def test_nothing_of_a_normal_run_imports_the_faults() -> None:
    import subprocess
    import sys

    code = (
        "import sys, moe_kernels.hf, moe_kernels.check\n"
        "print([m for m in sys.modules if m.startswith('moe_kernels.faults')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_check_command_prints_and_writes(models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moe_kernels.cli import main

    loaded, _ = models["fp8"]
    out = tmp_path / "check.json"
    assert main(["check", "fp8/emulated", "--model", str(loaded.path), "--tokens", "1", "5", "--json", str(out)]) == 0
    assert "PASS" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["ok"] and {f["probe"] for f in report["findings"]} >= {
        "parity",
        "repeat",
        "batch",
        "zero-block",
        "padding",
    }
    assert main(["check", "fp8/emulated:bias=bf16", "--model", str(loaded.path), "--tokens", "64"]) == 1
    assert "kernel chose" in capsys.readouterr().out


def test_a_bias_fault_is_put_down_to_routing(models) -> None:
    loaded, _ = models["fp8"]
    with inject(loaded, "bias_bf16"):
        failed = quick(models, "fp8").failed()
    assert failed and all(f.cause == "routing" for f in failed)
    with inject(loaded, "noise_10"):
        failed = quick(models, "fp8").failed("parity")
    assert failed and not any(f.cause for f in failed)


def test_contract_is_part_of_the_check(models) -> None:
    loaded, refs = models["fp8"]
    change = fault("dead_expert_scale").record
    assert change is not None
    report = check_model(loaded, refs, (8,), records=lambda layer: change(loaded.checkpoint.experts(layer)))
    (finding,) = report.failed("contract")
    assert "w13_scale" in finding.detail and finding.layer == 1
    assert report.failed() == [finding]  # the kernels themselves were sound


def test_rounded_rope_frequencies_break_the_contract(models) -> None:
    loaded, refs = models["fp8"]
    with inject(loaded, "rope_bf16"):
        (finding,) = check_model(loaded, refs, (8,)).failed()
    assert finding.probe == "contract" and "inv_freq differs" in finding.detail
    assert check_model(loaded, refs, (8,)).ok


def test_near_tie_flips_are_left_out_of_parity(models) -> None:
    """BF16 logits may decide a near tie; a router that flips such tokens only passes, and a far flip fails."""
    from moe_kernels.check import NEAR_TIE
    from moe_kernels.records import Routing
    from moe_kernels.routing import near_tie_gap, selection_scores

    loaded, refs = models["fp8"]
    layer = loaded.model.model.layers[1].mlp.layer

    def flipping(beyond: bool):
        def route(logits: torch.Tensor) -> Routing:
            right = type(layer).route(layer, logits)
            _, keys = selection_scores(logits, layer.bias, layer.config)
            gap = near_tie_gap(keys, layer.config.top_k, torch.float32).gap
            flip = gap >= NEAR_TIE if beyond else gap < NEAR_TIE
            ids = right.ids.clone()
            fifth = keys.sort(dim=-1, descending=True).indices[:, layer.config.top_k]
            ids[flip, -1] = fifth[flip]
            return Routing(ids, right.weights)

        return route

    for beyond, ok in ((False, True), (True, False)):
        report = CheckReport("x")
        layer.route = flipping(beyond)
        try:
            compare_layer(layer, refs[1], (128,), report)
        finally:
            del layer.route
        assert all(f.ok is ok for f in report.findings if f.probe == "parity"), beyond


def test_a_worst_token_is_named(models) -> None:
    loaded, refs = models["fp8"]
    reference: Reference = refs[1]
    with inject(loaded, "last_row_zero"):
        report = CheckReport("x")
        compare_layer(loaded.model.model.layers[1].mlp.layer, reference, (7,), report)
    parity = [f for f in report.failed("parity") if "emulation" in f.detail]
    assert "worst token 6" in parity[0].detail
