"""A small data set in GSM8K's format, mock servers, and one call that runs a whole comparison."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported

from evals.protocol import Sampling
from evals.run_options import RunOptions, arm_specs
from tests.evals.mock_server import Mock, read_gold, running

MOCK = Path(__file__).with_name("mock_server.py")


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    """Different small problems with a worked answer."""
    out = []
    for i in range(start, start + count):
        a, b = 3 + i * 7 % 90, 2 + i * 5 % 40
        out.append({
            "question": f"Person {i} has {a} apples and buys {b} more. How many apples is that?",
            "answer": f"The sum is {a}+{b}=<<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}",
        })
    return out


def write_jsonl(path: Path, lines: list[dict[str, Any]]) -> Path:
    """Rows to a JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl (30 problems) and test.jsonl (200 others)."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "train.jsonl", rows(30, start=1000))
    write_jsonl(folder / "test.jsonl", rows(200))
    return folder


@pytest.fixture(scope="session")
def gold(data_dir: Path) -> dict[str, str]:
    """question -> answer of test.jsonl."""
    return read_gold(data_dir / "test.jsonl")


@pytest.fixture
def serve(gold: dict[str, str]) -> Iterator[Callable[..., tuple[Mock, str]]]:
    """`serve(variant=…, faults=…)` starts a mock in a thread and gives (mock, url)."""
    with contextlib.ExitStack() as stack:
        def start(**behaviour: Any) -> tuple[Mock, str]:
            mock = Mock(gold, **behaviour)
            return mock, stack.enter_context(running(mock))

        yield start


@pytest.fixture
def options(tmp_path: Path, data_dir: Path) -> Callable[..., RunOptions]:
    """`options(baseline_url, candidate_url, **changes)`: a quick run of 30 items."""

    def make(baseline: str, *candidates: str, **changes: Any) -> RunOptions:
        sampling = Sampling(**{"max_tokens": 256, "concurrency": 8, **changes.pop("sampling", {})})
        defaults: dict[str, Any] = {
            "data": data_dir, "limit": 30, "shots": 2, "out": tmp_path / "run", "progress": False, "aa": False,
            "timeout": 5.0, "command": "evals run test",
        }
        return RunOptions(
            task="gsm8k", arms=arm_specs(None, baseline, [], candidates), sampling=sampling,
            **(defaults | changes),
        )

    return make


def server_cmd(data: Path, *extra: str) -> str:
    """A `--server-cmd` that starts the mock as a process."""
    return " ".join([sys.executable, str(MOCK), "--gold", str(data), "--variant {variant} --model {model}", *extra])
