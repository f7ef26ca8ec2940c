"""`service plan` against numbers worked out by hand, published totals, and what a loaded model really holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_kernels import hf
from service.__main__ import main
from service.engine.kv_cache import PagedKV
from service.plan import FORMATS, GIB, Request, make, matrix_bytes
from tests import family
from tests.service.engine_tools import Running

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"


def config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


# Totals and active parameters in units of 10^8: models.md 1.5 (computed there without MTP), Qwen's and DeepSeek's cards
# (30.5 B / 3.3 B, 235 B / 22 B, 671 B / 37 B; cards leave out embeddings or round down in the active ones).
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("glm-4.5-air", 1069, 134), ("glm-4.7", 3528, 336), ("glm-4.7-flash", 299, 39), ("glm-5", 7439, 418),
        ("glm-5.2", 7434, 413), ("qwen3-30b-a3b", 305, 34), ("qwen3-235b-a22b", 2351, 222), ("deepseek-v3", 6710, 376),
    ],
)  # fmt: skip
def test_parameters_are_the_published_ones(name: str, total: int, active: int) -> None:
    plan = make(config(name), Request("bf16"))
    assert round(plan.parameters / 1e8) == total and round(plan.active_parameters / 1e8) == active


# models.md 1.5: experts in the format, the rest BF16, in GiB
@pytest.mark.parametrize(
    ("name", "nvfp4", "fp8"),
    [("glm-4.5-air", 66, 106), ("glm-4.7", 207, 344), ("glm-4.7-flash", 19, 30), ("glm-5", 415, 711)],
)
def test_weights_are_the_published_ones(name: str, nvfp4: int, fp8: int) -> None:
    assert make(config(name), Request("nvfp4")).weights_bytes / GIB == pytest.approx(nvfp4, abs=0.6)
    assert make(config(name), Request("fp8")).weights_bytes / GIB == pytest.approx(fp8, abs=0.6)


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("glm-4.5-air", 46 * 2 * 8 * 128 * 2),
        ("glm-4.7", 92 * 2 * 8 * 128 * 2),
        ("glm-4.7-flash", 47 * (512 + 64) * 2),
        ("glm-5", 78 * (512 + 64) * 2 + 78 * 128 * 2),
        ("glm-5.2", 78 * (512 + 64) * 2 + 21 * 128 * 2),
        ("qwen3-30b-a3b", 48 * 2 * 4 * 128 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2),
    ],
)
def test_kv_bytes_per_token(name: str, by_hand: int) -> None:
    assert make(config(name), Request("fp8")).kv_bytes_per_token == by_hand


def test_air_by_hand() -> None:
    """Every part of GLM-4.5-Air with block FP8 experts: 45 MoE layers of 128 experts, 96 and 8 heads of 128."""
    plan = make(config("glm-4.5-air"), Request("fp8"))
    wide = 1408 * 4096 + 4 * 11 * 32  # gate or up, and down: 11 x 32 scales of FP32
    assert plan.weights == {
        "experts": 45 * 128 * 3 * wide,
        "shared_experts": 2 * 45 * 3 * 1408 * 4096,
        "dense_mlp": 2 * 3 * 10944 * 4096,
        "attention": 2 * 46 * (4096 * (12288 + 1024 + 1024) + 12288 * 4096 + 12288 + 1024 + 1024),
        "indexer": 0,
        "router": 4 * 45 * (128 * 4096 + 128),
        "norms": 2 * (46 * 2 + 1) * 4096,
        "embeddings": 2 * 151552 * 4096,
        "head": 2 * 151552 * 4096,
    }
    assert plan.weights_bytes == sum(plan.weights.values()) == plan.weights_bytes_per_gpu
    # 151,397,597,184 bytes of an H200 (141 GiB), 3 % and 2 GiB kept, and what a step holds:
    # 512 tokens * 8 experts * (2 * 4096 + 3 * 1408), 512 rows * (4 * 14336 + 8 * 4096 + 6 * 10944), logits of 64
    step = 512 * 8 * (8192 + 4224) + 512 * (4 * 14336 + 32768 + 65664) + 12 * 64 * 151552
    assert plan.reserved_bytes == int(0.03 * 141 * GIB) + 2 * GIB + step
    assert plan.kv_blocks == (141 * GIB - plan.reserved_bytes - plan.weights_bytes) // (16 * 188416)
    assert plan.tokens == 16 * plan.kv_blocks and plan.fits
    assert plan.sequences == plan.kv_blocks // (131072 // 16) and plan.sequences_of_8192 == plan.kv_blocks // 512


def test_air_as_measured_on_an_h200() -> None:
    """benchmarks/results/h200-serve.detail.json: random weights of the shape, all linears but the head block FP8."""
    measured = [call["air_memory"] for call in json.loads(
        (CONFIGS.parent / "results" / "h200-serve.detail.json").read_text())["calls"] if "air_memory" in call]
    assert measured
    for m in measured:
        asked = Request("fp8", "linears", gpu_memory_gib=m["card"] / GIB, max_model_len=2304, max_seqs=128,
                        max_batch_tokens=8192)
        plan = make(config("glm-4.5-air"), asked)
        assert plan.kv_bytes_per_token == m["kv_bytes_per_token"]
        assert plan.weights_bytes == pytest.approx(m["weights_bytes"], rel=1e-3)
        assert plan.weights["attention"] == m["weights"]["attention"]
        assert plan.weights["experts"] == pytest.approx(m["weights"]["experts"], rel=1e-6)
        assert plan.tokens == pytest.approx(m["kv_tokens"], rel=0.02)


@pytest.mark.parametrize(
    ("format", "by_hand"),
    [
        ("bf16", 2 * 200 * 320), ("fp8", 200 * 320 + 4 * 2 * 3), ("fp8_channel", 200 * 320 + 4 * 200),
        ("fp8_tensor", 200 * 320 + 8), ("nvfp4", 100 * 320 + 200 * 20 + 8), ("mxfp8", 200 * 320 + 200 * 10),
        ("mxfp4", 100 * 320 + 200 * 10),
    ],
)  # fmt: skip
def test_bytes_of_a_matrix(format, by_hand: int) -> None:
    assert matrix_bytes(format, 200, 320) == by_hand


@pytest.mark.parametrize("model_type", family.MODEL_TYPES)
def test_a_loaded_model_holds_what_was_planned(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of parameters, expert records and cache of a real load, for every format (hidden size 64)."""
    monkeypatch.setenv("MOE_PARITY_CACHE", str(tmp_path / "cache"))
    path = family.tiny(model_type, tmp_path / "m", moe_intermediate_size=64)
    for format in FORMATS if model_type == "glm_moe_dsa" else ("bf16", "nvfp4"):
        loaded = hf.load_model(path, f"{format}/reference" if format != "bf16" else "bf16/reference")
        plan = make(loaded.checkpoint.config, Request(format))
        tensors = [*loaded.model.parameters(), *(b for n, b in loaded.model.named_buffers() if "rotary" not in n)]
        rest = sum(t.numel() * t.element_size() for t in tensors)
        records = [loaded.checkpoint.experts(layer) for layer in loaded.resolved]
        experts = sum(t.numel() * t.element_size() for r in records for t in vars(r).values()
                      if isinstance(t, torch.Tensor))
        assert plan.weights["experts"] == experts and plan.weights_bytes == experts + rest
    with Running(loaded, kv_blocks=3) as engine:
        kv = engine.runner.kv
        pools = [kv.k, kv.v] if isinstance(kv, PagedKV) else [kv.pool, *kv.index_keys.values()]
        assert sum(p.numel() * p.element_size() for p in pools) == 4 * 16 * plan.kv_bytes_per_token


def test_more_gpus_share_what_can_be_shared() -> None:
    """KV heads are split down to one a GPU, latents not at all; router and norms lie on each."""
    one, four, sixteen = (make(config("glm-4.7"), Request("fp8", gpus=n)) for n in (1, 4, 16))
    assert not one.fits and one.short_bytes > 0 and four.fits and sixteen.fits
    whole = one.weights["router"] + one.weights["norms"]
    assert four.weights_bytes_per_gpu == whole + -(-(one.weights_bytes - whole) // 4)
    assert four.kv_bytes_per_token_per_gpu * 4 == one.kv_bytes_per_token
    assert sixteen.kv_bytes_per_token_per_gpu * 8 == one.kv_bytes_per_token  # 8 KV heads
    flash = make(config("glm-4.7-flash"), Request("nvfp4", gpus=4))
    assert flash.kv_bytes_per_token_per_gpu == flash.kv_bytes_per_token
    linears = make(config("glm-4.5-air"), Request("fp8", "linears"))
    assert linears.weights["attention"] < 0.51 * make(config("glm-4.5-air"), Request("fp8")).weights["attention"]
    assert linears.weights["head"] == 2 * 151552 * 4096


def test_command(tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    air = str(CONFIGS / "glm-4.5-air.json")
    assert main(["plan", "--model", air, "--format", "fp8", "--max-model-len", "8192"]) == 0
    out = capsys.readouterr().out
    assert "106.9 B parameters" in out and "188,416 bytes a token" in out and "of 8,192 tokens" in out
    assert main(["plan", "--model", air, "--format", "bf16", "--gpu-memory", "80"]) == 0
    assert "4 such GPUs hold it" in capsys.readouterr().out
    assert main(["plan", "--model", str(tiny_checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "bf16"
    for arguments, why in (
        (["--model", air], "--format is needed"),
        (["--model", air, "--format", "fp8", "--gpus", "7"], "--gpus 7 does not divide the model's 96"),
        (["--model", str(tmp_path / "no.json"), "--format", "fp8"], "no such file"),
        (["--model", air, "--format", "fp8", "--gpu-memory", "0"], "must be positive"),
    ):
        try:
            code: object = main(["plan", *arguments])
        except SystemExit as stop:
            code = stop.code
        error = capsys.readouterr().err
        assert code == 2 and why in error and error.count("\n") == 1
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm5_next", "n_routed_experts": 288}))
    assert main(["plan", "--model", str(tmp_path), "--format", "fp8"]) == 2
    assert "supported: glm4_moe" in capsys.readouterr().err
