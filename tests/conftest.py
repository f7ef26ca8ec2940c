"""Fixtures shared by all tests; anything under ../shared is optional and skipped with a reason when absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(os.environ.get("MOE_PARITY_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def shared(relative: str) -> Path:
    """A path under ../shared, or skip."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"{relative} is not in {SHARED} (present in our workplace, not in a user's clone)")
    return path


@pytest.fixture(scope="session")
def mini_checkpoint() -> Path:
    """The trained 23 M-parameter GLM-4-MoE development checkpoint (BF16)."""
    return shared("checkpoints/glm4moe-mini")


@pytest.fixture(scope="session")
def mini_heldout() -> Path:
    """1,319 held-out generated problems for that checkpoint."""
    return shared("data/mini-heldout.jsonl")


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """Real GSM8K (train.jsonl, test.jsonl)."""
    return shared("data/gsm8k")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BF16 glm4_moe checkpoint without tokenizer."""
    from tests.tiny import glm4_moe

    return glm4_moe(tmp_path_factory.mktemp("tiny") / "glm4_moe")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests with the reason on machines without the GPU they need."""
    import torch

    sm = 0
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        sm = major * 10 + minor
    for item in items:
        if item.get_closest_marker("gpu") and sm < 89:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU with FP8 (SM89+), found SM{sm}"))
        if item.get_closest_marker("blackwell") and sm not in (100, 103):
            item.add_marker(pytest.mark.skip(reason=f"needs SM100/SM103 (Blackwell), found SM{sm}; never run here"))
