"""Variant files for the stand-in engines, and a run of `evals` on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.evals.conftest import data_dir as data_dir
from tests.evals.conftest import gold as gold

FAKE = Path(__file__).with_name("fake_engine.py")
Write = Callable[..., Path]


@pytest.fixture
def variant(tmp_path: Path, data_dir: Path) -> Write:
    """`variant("sglang", kernel=…, runs=…, …)`: a YAML file that starts a stand-in; `fake` goes to it as flags."""

    def make(engine: str, kernel: str = "flashinfer_trtllm", fake: tuple[str, ...] = (), **more: Any) -> Path:
        flag = {"sglang": "--moe-runner-backend", "vllm": "--moe-backend"}[engine]
        name = more.pop("name", f"{engine}-{kernel}")
        data: dict[str, Any] = {
            "name": name, "engine": engine, "kernel": kernel, "model": "zai-org/GLM-4.5-Air-FP8",
            "command": [sys.executable, str(FAKE), engine, "--gold", str(data_dir), "--model-path", "{model}",
                        "--host", "{host}", "--port", "{port}", flag, kernel, *fake],
            "ready": {"timeout": 120},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data | more))
        return path

    return make


@pytest.fixture
def evaluate(tmp_path: Path, data_dir: Path) -> Callable[..., int]:
    """`evaluate(baseline_file, candidate_file, *options)`: `evals run` on 20 items; gives the exit code."""
    from evals.cli import main

    def run(baseline: Path, candidate: Path, *more: str, out: Path | None = None) -> int:
        return main([
            "run", "gsm8k", "--baseline-file", str(baseline), "--candidate-file", str(candidate),
            "--data", str(data_dir), "--limit", "20", "--shots", "2", "--max-tokens", "256", "--no-aa", "--quiet",
            "--out", str(out or tmp_path / "run"), "--margin", "30", "--smoke", "4", *more,
        ])

    return run
