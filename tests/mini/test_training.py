"""The training recipe on a CPU: the forward is transformers' Glm4Moe, a run continues exactly, exports are exact."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from evals.mini import export, state, stream, train
from evals.mini.experts import Combine, Dispatch, Scatter, grouped_linear, plan_groups
from evals.mini.network import BIAS_OFFSET, ROUTER_ROW_NORM, TOY, MiniConfig, MiniNetwork
from evals.mini.optimizer import MuonAdamW, orthogonalise
from evals.mini.steps import check
from evals.mini.tokenizer import END, MODEL_DIR, USER, VOCAB_SIZE

SMALL = dataclasses.replace(TOY, layers=2, hidden=128, experts=8)


def network(config: MiniConfig = SMALL, seed: int = 3) -> MiniNetwork:
    """Random weights with nothing left at its neutral value."""
    made = MiniNetwork(config)
    made.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        made.biases.copy_(0.1 * torch.randn(made.biases.shape, generator=generator).clamp(-1, 1))
    return made


@pytest.fixture(autouse=True)
def _smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TOY", SMALL)


def options(out: Path, *extra: str) -> train.argparse.Namespace:
    return train.arguments().parse_args([
        "--toy", "--out", str(out), "--steps", "4", "--rows", "2", "--length", "192", "--workers", "0",
        "--device", "cpu", "--no-compile", "--probe", "1", "--probe-every", "100", "--log-every", "2", *extra,
    ])  # fmt: skip


def test_forward_is_transformers_glm4_moe(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = network(dataclasses.replace(TOY, layers=3))
    config = export.hf_config(ours.config, fp8=False) | {"dtype": "float32"}
    export._finish(tmp_path, config, export.hf_tensors(ours), MODEL_DIR)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = ours.logits(tokens, torch.float32), theirs(tokens).logits
    assert b.std() > 0.05
    assert (a - b).abs().max() < 2e-5


def test_grouping_is_a_permutation_and_gradients_match_a_dense_sum() -> None:
    torch.manual_seed(0)
    tokens, k, experts, width = 37, 3, 8, 16
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, k, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(experts, width, width, dtype=torch.float64, requires_grad=True)
    plan = plan_groups(ids, experts)
    assert plan.counts.tolist() == torch.bincount(ids.flatten(), minlength=experts).tolist()
    rows = Dispatch.apply(x, plan.source, plan.place)
    scale = Scatter.apply(weights.flatten(), plan.place, rows.shape[0])
    out = Combine.apply(grouped_linear(rows, matrices, plan.ends) * scale[:, None], plan.source, plan.place, tokens)
    expected = torch.einsum("tkio,ti,tk->to", matrices.mT[ids], x, weights)
    assert torch.allclose(out, expected)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, weights, matrices), direction)
    theirs = torch.autograd.grad(expected, (x, weights, matrices), direction)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b)


def test_muon_update_has_singular_values_near_one() -> None:
    g = torch.randn(4, 24, 60, generator=torch.Generator().manual_seed(1))
    for shaped in (g, g.mT):
        values = torch.linalg.svdvals(orthogonalise(shaped))
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_bias_balancing_moves_towards_even_load() -> None:
    made = network()
    made.biases.zero_()
    before = made.biases.clone()
    loads = torch.ones(1, SMALL.experts)
    loads[0, 2] = 100
    means = torch.randn(1, SMALL.hidden, generator=torch.Generator().manual_seed(2))
    made.balance(loads, means, 0.01)
    moved = made.biases - before
    assert moved[0, 2] < 0
    assert (moved[0, [0, 1, 3]] > 0).all()
    assert abs(float(made.biases.mean())) < 1e-6
    router = made.blocks[1]["router"].detach()
    assert (router @ means[0]).abs().max() < 1e-4 * float(router.norm() * means[0].norm())  # nothing of the mean input
    assert (router * made.blocks[1]["ln2"].detach()).norm(dim=1).max() < ROUTER_ROW_NORM * 1.0001


def test_training_lowers_the_loss_and_exports_a_loadable_checkpoint(tmp_path: Path) -> None:
    folder = train.run(options(tmp_path, "--steps", "16"))
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if "loss" in r]
    assert losses[-1] < losses[0] - 0.15
    stored = load_file(folder / "model.safetensors")
    bias = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert abs(float(bias.mean()) - BIAS_OFFSET) < 1e-3
    assert stored["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_a_stopped_run_continues_exactly(tmp_path: Path) -> None:
    whole = train.run(options(tmp_path / "whole", "--save-at", "2"))
    stopped = train.run(options(tmp_path / "first", "--stop-after", "2"))
    resumed = train.run(options(tmp_path / "second", "--resume", str(stopped)))
    a, b = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def test_a_state_of_another_plan_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    stopped = train.run(options(tmp_path / "first", "--stop-after", "1"))
    with pytest.raises(state.StateError, match="seed"):
        train.run(options(tmp_path / "other", "--resume", str(stopped), "--seed", "9"))
    part = stopped / "state-0.part"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(state.StateError, match="hash"):
        train.run(options(tmp_path / "damaged", "--resume", str(stopped)))


def test_state_of_the_shipped_size_fits_its_limits(tmp_path: Path) -> None:
    made = MiniNetwork(MiniConfig())
    made.initialise(0)
    state.write(tmp_path, made, MuonAdamW(made), {"step": 0})
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert max(sizes) <= 16 * 2**20
    assert sum(sizes) <= 64 * 2**20


def test_block_fp8_matches_a_plain_loop() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(5)) * 0.05
    values, scale = export.block_fp8(weight)
    back = export.dequantise(values, scale)
    for i in range(2):
        for j in range(3):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            assert scale[i, j] == block.abs().max() / 448
            stored = values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].float() * scale[i, j]
            assert torch.equal(back[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)], stored)
            assert ((stored - block).abs() <= block.abs() / 16 + scale[i, j] * 2**-9).all()  # half a step of E4M3


def test_batches_depend_on_seed_and_step_only() -> None:
    a = stream.batch(1, 5, 4, 512)
    assert a.shape == (4, 513)
    assert np.array_equal(a, stream.batch(1, 5, 4, 512, stream.Encoder()))
    assert not np.array_equal(a, stream.batch(1, 6, 4, 512))
    assert not np.array_equal(a, stream.batch(2, 5, 4, 512))
    made = list(stream.batches(1, 5, 7, 4, 512, workers=2))
    assert np.array_equal(made[0], a)
    assert np.array_equal(made[1], stream.batch(1, 6, 4, 512))


def test_rows_are_well_filled_documents() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    rows = stream.batch(3, 0, 64, 512)
    assert (rows >> 14 != stream.NONE >> 14).mean() > 0.9
    answers = 0
    for row in rows[:24]:
        tokens, marks = row & stream.TOKEN_MASK, row >> 14 << 14
        ends = np.flatnonzero(np.isin(tokens, (END, USER)) & (marks == stream.ANSWER))
        for end in ends:  # walk back over the answer's tokens: they are the ones with full loss
            start = end
            while start > 0 and marks[start - 1] == stream.ANSWER:
                start -= 1
            check(tokenizer.decode(tokens[start:end].tolist()).removeprefix(" "))
            answers += 1
    assert answers > 30


def test_schedule() -> None:
    values = [train.schedule(step, 1000) for step in range(1000)]
    assert max(values) == 1
    assert values[0] < 0.02
    assert values[399] == pytest.approx(1)
    assert values[700] == pytest.approx(0.5)
    assert 0 < values[-1] < 0.002


def test_runs_started_together_agree_on_their_length(tmp_path: Path) -> None:
    assert train.agree(None, 500) == 500
    assert train.agree(tmp_path / "steps", 700) == 700
    assert train.agree(tmp_path / "steps", 900) == 700
