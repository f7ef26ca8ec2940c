"""The command line: fast, one-line errors with exit code 2, reports in every format."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from evals import cli
from evals.run_options import redacted
from tests.evals.conftest import server_cmd
from tests.evals.mock_server import Mock

Serve = Callable[..., tuple[Mock, str]]


def fails(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """The one line an `evals` command line prints before it exits with `code`."""
    assert cli.main(words) == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and err.startswith("evals: ")
    return err.strip()


def test_help_does_not_import_the_heavy_things() -> None:
    code = (
        "import sys; from evals import cli\n"
        "try: cli.main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('lm_eval', 'datasets', 'torch', 'scipy', 'aiohttp', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
    assert "--baseline-url" in done.stdout and "exit codes: 0 PASS" in done.stdout


def test_package_imports_neither_models_nor_service() -> None:
    code = "import sys, evals.run_judge, evals.lm, evals.run_arm; print([m for m in " \
           "('moe_kernels', 'service', 'torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm9k"], "unknown task 'gsm9k'; known: gsm8k"),
        (["gsm8k"], "exactly one of --baseline VARIANT and --baseline-url URL"),
        (["gsm8k", "--baseline", "a", "--baseline-url", "http://x"], "exactly one of"),
        (["gsm8k", "--baseline", "a"], "at least one --candidate"),
        (["gsm8k", "--baseline", "a", "--candidate", "b", "--data", "{data}"], "--model PATH is needed"),
        (["gsm8k", "--baseline-url", "host:1", "--candidate-url", "http://x"], "'host:1' is not a server URL"),
        (["{urls}", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["{urls}", "--data", "/nowhere"], "no file /nowhere"),
        (["{urls}", "--shots", "99"], "--shots 99 needs 99 training rows, found 30"),
        (["{urls}", "--margin", "0"], "--margin"),
        (["{urls}", "--alpha", "2"], "--alpha"),
        (["{urls}", "--repeats", "0"], "--repeats must be at least 1"),
        (["{urls}", "--looks", "3", "--repeats", "2"], "cannot be combined"),
        (["{urls}", "--factor", "shot"], "unknown --factor 'shot'"),
        (["{urls}", "--resume"], "--resume needs --out DIR"),
        (["{urls}", "--floor", "/nowhere"], "is not a run folder"),
        (["{urls}", "--chat-template-kwargs", "{"], "--chat-template-kwargs is not JSON"),
        (["{urls}", "--extra-body", "[1]"], "--extra-body must be a JSON object"),
        (["{urls}", "--system", "x"], "need --endpoint chat"),
        (["{urls}", "--endpoint", "chat", "--prompt-prefix", "x"], "needs --endpoint completions"),
        (["{urls}", "--format", "pdf"], "unknown --format 'pdf'"),
        (["{urls}", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["{urls}", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["{urls}"], "does not answer"),
        (["{urls}", "--out", "/proc/x"], "cannot write to /proc/x"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: list[str], said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    urls = ["gsm8k", "--baseline-url", "http://127.0.0.1:9", "--candidate-url", "http://127.0.0.1:9", "--quiet"]
    if "--data" not in words:
        urls += ["--data", "{data}"]
    full = [w for word in words for w in (urls if word == "{urls}" else [word])]
    err = fails(capsys, "run", *(w.replace("{data}", str(data_dir)) for w in full))
    assert said in err


def test_data_from_the_hub_is_refused_offline_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, "run", "gsm8k", "--baseline-url", "http://a", "--candidate-url", "http://b")
    assert "cannot load openai/gsm8k from the hub" in err and "--data DIR" in err


def test_a_server_that_does_not_start_is_one_line(
    capsys: pytest.CaptureFixture[str], data_dir: Path, tmp_path: Path
) -> None:
    command = server_cmd(data_dir, "--fail-start", "'error: unknown variant; known: fp8/emulated'")
    err = fails(capsys, "run", "gsm8k", "--model", "m", "--baseline", "a", "--candidate", "b", "--quiet", "--data",
                str(data_dir), "--server-cmd", command, "--out", str(tmp_path / "run"))
    assert "the server for 'a' did not start: unknown variant; known: fp8/emulated (exit code 1, log: " in err


@pytest.mark.parametrize("words", [["report", "/nowhere"], ["compare", "/nowhere", "/else"]])
def test_no_run_folder(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert "is not a run folder" in fails(capsys, *words)


def test_unknown_command_is_argparse_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["ran"])
    assert stop.value.code == 2 and "invalid choice: 'ran'" in capsys.readouterr().err


def test_secrets_are_not_written() -> None:
    assert redacted(["--api-key", "s", "x", "--api-key=s"]) == ["--api-key", "…", "x", "--api-key=…"]


def test_run_report_compare(
    serve: Serve, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, a), (_, b) = serve(variant="fp8/a"), serve(variant="fp8/b", wrong=0.5)
    monkeypatch.setenv("EVALS_API_KEY", "secret")
    out = tmp_path / "run"
    words = ["run", "gsm8k", "--baseline-url", a, "--candidate-url", b + "/v1", "--data", str(data_dir), "--limit",
             "60", "--shots", "1", "--out", str(out), "--format", "json"]
    assert cli.main(words) == 1
    printed, progress = capsys.readouterr()
    report = json.loads(printed)
    assert report["state"] == "FAIL" and json.loads((out / "report.json").read_text()) == report
    assert "baseline_repeat: 60/60" in progress and "| Answer:" in progress  # progress, and the prompt shown
    for name in ("run.json", "items.jsonl", "report.md", "report.html", "junit.xml", "flips.jsonl", "dataset.jsonl"):
        assert (out / name).stat().st_size > 0 and "secret" not in (out / name).read_text()
    assert ET.parse(out / "junit.xml").getroot().tag == "testsuites"
    before = (out / "report.json").read_bytes()
    assert cli.main(["report", str(out), "--format", "md"]) == 1
    assert "### Accuracy check" in capsys.readouterr().out
    assert (out / "report.json").read_bytes() == before
    code = cli.main(["compare", f"{out}:candidate", str(out), "--format", "json", "--out", str(tmp_path / "c")])
    swapped = json.loads(capsys.readouterr().out)
    assert swapped["exit_code"] == code != 1 and swapped["comparisons"][0]["name"] == "candidate"
    assert (tmp_path / "c" / "report.json").exists()
