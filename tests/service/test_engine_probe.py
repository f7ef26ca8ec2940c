"""The determinism probe tells invariant engines from others; the fingerprint's id covers what it should."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from service import fingerprint
from service.engine.probe import run_probe
from service.tokenizer import Tokenizer
from tests.service.engine_tools import Running, byte_tokenizer

hf = pytest.importorskip("moe_kernels.hf")


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Path):
    return hf.load_model(tiny_checkpoint, "bf16/reference:bias=bf16")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def test_probe_of_this_engine(loaded) -> None:
    with Running(loaded) as engine:
        found = run_probe(engine)
    assert found.batch_invariant and found.repeatable and found.max_logprob_difference == 0.0
    assert "451 log-probabilities" in found.probe and "bit-equal" in found.probe


def test_probe_sees_batch_dependence(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits moved by a hair that depends on the batch's size: not invariant, but repeatable."""
    with Running(loaded) as engine:
        real = engine.runner.hidden
        monkeypatch.setattr(engine.runner, "hidden", lambda batch: real(batch) * (1 + 2e-2 * (len(batch.chunks) > 1)))
        found = run_probe(engine)
    assert not found.batch_invariant and found.repeatable
    assert found.max_logprob_difference is None or found.max_logprob_difference > 0


def test_probe_fits_small_limits(loaded) -> None:
    with Running(loaded, max_model_len=16, kv_blocks=2, kv_block=8) as engine:
        assert run_probe(engine, rounds=1).batch_invariant


def test_fingerprint(loaded, tokenizer: Tokenizer) -> None:
    with Running(loaded, tokenizer, kv_blocks=20) as engine:
        first = fingerprint.build(loaded, tokenizer, engine, "tiny")
        second = fingerprint.build(loaded, tokenizer, engine, "tiny", probe=False)
    assert json.loads(json.dumps(first)) == first
    assert first["variant"] == {
        "requested": "bf16/reference:bias=bf16", "fallbacks": 0,
        "resolved": {"1": "bf16/reference:bias=bf16", "2": "bf16/reference:bias=bf16"}}
    assert first["format"] == "bf16" and first["dtype"] == "bfloat16" and first["device"] == "cpu"
    assert first["engine"]["kv_blocks"] == 20 and first["max_model_len"] == 320
    assert first["weights_sha256"] == loaded.weights_sha256 and first["tokenizer_sha256"] == tokenizer.sha256()
    assert first["determinism"]["batch_invariant"] is True and second["determinism"]["batch_invariant"] is None
    assert first["id"] != second["id"]

    moved = copy.deepcopy(first)
    moved["path"] = "/elsewhere"
    assert fingerprint.identify(moved) == first["id"]
    for key in ("weights_sha256", "dtype", "model"):
        changed = copy.deepcopy(first)
        changed[key] = "other"
        assert fingerprint.identify(changed) != first["id"]
    changed = copy.deepcopy(first)
    changed["variant"]["resolved"]["2"] = "bf16/reference"
    assert fingerprint.identify(changed) != first["id"]
