"""Killed at any point and resumed: only missing items are asked, and the report has the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from evals.run_judge import judge_run
from tests.evals.conftest import server_cmd


def command(out: Path, data: Path, count: Path, *extra: str, delay: float = 0.0) -> list[str]:
    cmd = server_cmd(data, f"--count {count} --delay {delay} --wrong mock/a=0.1 --wrong mock/b=0.12")
    return [
        sys.executable, "-m", "evals.cli", "run", "gsm8k", "--model", "m", "--baseline", "mock/a", "--candidate",
        "mock/b", "--data", str(data), "--limit", "50", "--shots", "1", "--max-tokens", "256", "--concurrency", "4",
        "--server-cmd", cmd, "--out", str(out), "--quiet", *extra,
    ]


def report(path: Path) -> bytes:
    """report.json's bytes without the timing block; the command names paths that differ between our runs."""
    from evals.report import model

    data = json.loads((path / "run.json").read_text())
    data["meta"]["command"] = "the command"
    (path / "run.json").write_text(json.dumps(data))
    return model.dumps(model.build(judge_run(path)), timing=False).encode()


def asked(count: Path) -> int:
    return len(count.read_text().splitlines()) if count.exists() else 0


def children() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "mock_server.py" in " ".join(p.info["cmdline"] or [])
            and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> tuple[Path, int]:
    """An uninterrupted run, and how many requests it took."""
    folder = tmp_path_factory.mktemp("whole")
    done = subprocess.run(command(folder / "run", data_dir, folder / "count"), capture_output=True, text=True)
    assert done.returncode in (0, 1, 3, 5), done.stderr
    return folder / "run", asked(folder / "count")


def kill_when(process: subprocess.Popen[str], journal: Path, lines: int, sign: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
            process.send_signal(sign)
            return
        time.sleep(0.01)
    raise AssertionError(f"never reached {lines} rows (exit {process.poll()})")


@pytest.mark.parametrize("lines", [7, 100])
def test_t30_kill_9_and_resume_give_the_same_bytes(
    tmp_path: Path, data_dir: Path, whole: tuple[Path, int], lines: int
) -> None:
    reference, requests = whole
    out, count = tmp_path / "run", tmp_path / "count"
    process = subprocess.Popen(command(out, data_dir, count, delay=0.05), text=True, stderr=subprocess.PIPE)
    kill_when(process, out / "items.jsonl", lines, signal.SIGKILL)
    process.wait()
    journal = (out / "items.jsonl").read_bytes()
    (out / "items.jsonl").write_bytes(journal[:-25])  # and the last line torn, as by a power cut
    kept = journal[:-25].count(b"\n")
    before = asked(count)
    done = subprocess.run(command(out, data_dir, count, "--resume"), capture_output=True, text=True)
    assert done.returncode in (0, 1, 3, 5), done.stderr
    assert asked(count) - before == requests - kept
    assert report(out) == report(reference)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_rows_stops_servers_and_says_how_to_go_on(
    tmp_path: Path, data_dir: Path, whole: tuple[Path, int], sign: int
) -> None:
    out, count = tmp_path / "run", tmp_path / "count"
    process = subprocess.Popen(
        command(out, data_dir, count, "--api-key=secret", delay=0.2), text=True, stderr=subprocess.PIPE
    )
    kill_when(process, out / "items.jsonl", 20, sign)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    last = said.strip().splitlines()[-1]
    assert last.startswith("evals: interrupted; what is finished is kept. Go on with: evals run gsm8k")
    assert last.endswith("--resume") and "secret" not in last and str(out) in last
    assert str(count) not in " ".join(" ".join(psutil.Process(p).cmdline()) for p in children())
    rows = (out / "items.jsonl").read_bytes()
    assert rows.endswith(b"\n") and rows.count(b"\n") >= 20
    assert "secret" not in (out / "run.json").read_text() + rows.decode()


def test_finished_run_resumed_asks_nothing(tmp_path: Path, data_dir: Path, whole: tuple[Path, int]) -> None:
    reference, _ = whole
    out, count = tmp_path / "run", tmp_path / "count"
    shutil.copytree(reference, out)
    done = subprocess.run(command(out, data_dir, count, "--resume"), capture_output=True, text=True)
    assert done.returncode in (0, 1, 3, 5), done.stderr
    assert asked(count) == 0
    assert report(out) == report(reference)


def test_another_variant_cannot_take_over_the_folder(data_dir: Path, tmp_path: Path, whole: tuple[Path, int]) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    words: list[Any] = command(out, data_dir, tmp_path / "c", "--resume")
    words[words.index("mock/b")] = "mock/c"
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2 and "was started differently (arms" in done.stderr
