"""The family matrix: a few of its cells in every run, all of them (`slow`) against benchmarks/results/family.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_kernels import registry
from moe_kernels.formats import open_checkpoint
from tests import family
from tests.matrix import LAYOUTS, REFUSED_MODELS, Bench, Cell, cells, check, evaluate, needs_gpu

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "family.json"
# Every model type, every layout and every CPU variant once.
QUICK = [
    ("glm4_moe", "fp8_ct", "fp8/emulated"), ("glm4_moe", "mxfp4_quark", "mxfp4/emulated"),
    ("glm4_moe", "fp8_channel_modelopt", "fp8_channel/reference"), ("glm4_moe", "mxfp8_ct", "mxfp8/reference"),
    ("glm4_moe_lite", "bf16", "bf16/reference"), ("glm4_moe_lite", "nvfp4", "nvfp4/emulated"),
    ("glm4_moe_lite", "fp8_tensor", "fp8_tensor/emulated"), ("glm4_moe_lite", "mxfp8_hf", "mxfp8/emulated"),
    ("glm_moe_dsa", "fp8", "fp8/reference"), ("glm_moe_dsa", "nvfp4_mixed", "nvfp4/emulated"),
    ("glm_moe_dsa", "mxfp4", "mxfp4/reference"), ("glm_moe_dsa", "nvfp4_w4a16", "nvfp4/reference"),
    ("deepseek_v3", "fp8_channel", "fp8_channel/emulated"), ("deepseek_v3", "fp8_pb_wo", "fp8/emulated"),
    ("qwen3_moe", "nvfp4_ct", "nvfp4/reference"), ("qwen3_moe", "mxfp8", "mxfp8/emulated"),
    ("qwen3_moe", "bf16", "fp8_tensor/reference"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("matrix")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_PARITY_CACHE", str(root / "cache"))
        yield Bench(root)


@pytest.mark.parametrize("cell", QUICK, ids="-".join)
def test_quick(bench: Bench, cell: tuple[str, str, str]) -> None:
    assert evaluate(bench, *cell).status == "works"


def test_quick_touches_everything() -> None:
    assert {model for model, _, _ in QUICK} == set(family.MODEL_TYPES)
    assert {layout for _, layout, _ in QUICK} == set(LAYOUTS) - {"int4_ct"}
    assert {variant for _, _, variant in QUICK} == {n for n in registry.names() if not needs_gpu(registry.info(n))}


@pytest.mark.parametrize(
    ("cell", "status", "why"),
    [
        (("glm4_moe", "nvfp4", "fp8/emulated"), "refused", "quantising nvfp4 weights again to fp8"),
        (("glm4_moe", "int4_ct", "bf16/reference"), "refused", "INT4"),
        (("qwen3_moe", "fp8", "fp8/triton"), "refused", "softmax"),
        (("deepseek_v3", "fp8", "fp8/triton"), "refused", "expert groups"),
        (("glm4_moe", "fp8", "fp8/trtllm"), "not_yet", "SM100"),
        (("glm5_next", "bf16", "bf16/reference"), "refused", "linear-attention"),
    ],
)
def test_what_does_not_run_says_why(bench: Bench, cell: tuple[str, str, str], status: str, why: str) -> None:
    got = evaluate(bench, *cell)
    assert got.status == status and why in got.reason


def test_a_wrong_global_scale_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Format D's scalars not inverted, or gate's scalar used for up: the cell does not work."""
    from moe_kernels import hf
    from moe_kernels.formats.checkpoint import Checkpoint

    real = Checkpoint.experts
    loaded = hf.load_model(bench.folder("glm4_moe", "nvfp4_ct"), "nvfp4/reference")
    for wrong in (lambda s: s.reciprocal(), lambda s: s[:, :1].expand_as(s) * 1.2):
        def read(self: Checkpoint, layer: int, wrong=wrong):
            record = real(self, layer)
            assert record.w13_scale_2 is not None
            if self.format == "nvfp4":
                record.w13_scale_2 = wrong(record.w13_scale_2)
            return record

        monkeypatch.setattr(Checkpoint, "experts", lambda self, layer: real(self, layer)
                            if self.format != "nvfp4" else read(self, layer))
        with pytest.raises(AssertionError, match="weights differ from the original"):
            check(bench, "glm4_moe", loaded, open_checkpoint(bench.folder("glm4_moe", "nvfp4_ct")))


def test_the_published_table_is_whole() -> None:
    """family.json has every cell of today's registry and layouts, none of them wrong."""
    found = [Cell(**c) for c in json.loads(RESULT.read_text())]
    assert [(c.model, c.format, c.variant) for c in found] == list(cells())
    assert {c.status for c in found} <= {"works", "refused", "not_yet"} and all(c.reason for c in found)
    assert all(c.status == "refused" for c in found if c.model in REFUSED_MODELS)


@pytest.mark.slow
def test_all_cells(bench: Bench) -> None:
    """Under ten minutes on two cores; statuses are the published ones (a GPU's results count as not run here)."""
    for cell in (Cell(**c) for c in json.loads(RESULT.read_text())):
        got = evaluate(bench, cell.model, cell.format, cell.variant)
        if needs_gpu(registry.info(cell.variant)) and cell.status == "works":
            assert got.status == "not_yet", cell
        else:
            assert got.status == cell.status, (cell, got)
