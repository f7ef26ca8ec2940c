"""A BF16 correction bias: routing moves, accuracy does not, and the verdict says CHANGED and names routing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.forced.limits import Limits, logprob_evidence, routing_evidence
from evals.forced.records import RoutingTrace, Scores
from evals.forced.routing import Agreement
from evals.pairing import pair
from evals.verdict import judge
from moe_kernels.hf import capture_routing, load_model
from tests.evals.arms import arm

ROOT = Path(__file__).resolve().parents[2]
# design.md: share of tokens with another expert set in layers 1 to 5, over 1,319 problems
DESIGN = (57, 21, 18, 21, 32)


@pytest.fixture(scope="module")
def agreement(mini_checkpoint: Path, mini_heldout: Path) -> Agreement:
    """Routing of 24 gold solutions with an FP32 and a BF16 bias, through the loaded model itself."""
    from tokenizers import Tokenizer

    rows = [json.loads(line) for line in mini_heldout.read_text().splitlines()[:24]]
    total, traces = Agreement(), []
    for variant in ("fp8/emulated", "fp8/emulated:bias=bf16"):
        loaded = load_model(mini_checkpoint, variant)
        tokenizer = Tokenizer.from_file(str(loaded.path / "tokenizer.json"))
        seen = []
        for row in rows:
            ids = tokenizer.encode(f"Question: {row['question']}\nAnswer: {row['answer']}").ids
            with torch.inference_mode(), capture_routing(loaded.model) as trace:
                loaded.model.model(input_ids=torch.tensor([ids]), use_cache=False)
            routing = RoutingTrace(trace.ids().numpy().astype(np.int64), trace.layers, trace.gaps().double().numpy())
            n = len(ids)
            empty = np.zeros((n, 1))
            seen.append(Scores("x", np.array(ids), np.zeros(n), empty.astype(np.int64), empty, ("",) * n, 1, routing))
        traces.append(seen)
    for a, b in zip(*traces, strict=True):
        total.add(a, b)
    return total


def test_flips_are_those_of_the_design(agreement: Agreement) -> None:
    """Layer 1, where only the bias differs, is sharp (58 % on 60 texts); deeper ones depend on the texts."""
    flips = [100 * (1 - x.exact) for x in agreement.by_layer()]
    assert flips[0] == pytest.approx(DESIGN[0], abs=4)
    assert all(abs(got - want) < 10 for got, want in zip(flips[1:], DESIGN[1:], strict=True)), flips


def test_verdict_is_changed_and_names_routing(agreement: Agreement) -> None:
    routing = routing_evidence(agreement.by_layer(), None, Limits())
    assert routing.moved and routing.metrics["beyond_ties_worst"] > 0.05
    right = [True] * 192 + [False] * 8
    logprobs = logprob_evidence({}, None, True, Limits())
    verdict = judge(pair(arm("baseline", right), arm("candidate", right)), evidence=(routing, logprobs))
    assert verdict.state == "CHANGED" and [r.code for r in verdict.reasons] == ["layer:routing"]
    assert verdict.analysis is not None and verdict.analysis.ni.shown
    assert "routing" in verdict.headline


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_layers_over_1319_items(mini_checkpoint: Path, mini_heldout: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bias_change.py"), "--model", str(mini_checkpoint),
               "--data", str(mini_heldout), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    table = report["comparisons"][0]["numbers"]["table"]
    assert table["n"] == 1319 and table["b"] + table["c"] <= 5
