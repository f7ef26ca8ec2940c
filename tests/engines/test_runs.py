"""Whole comparisons through `evals run --baseline-file … --candidate-file …` against stand-ins for SGLang and vLLM."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.conftest import FAKE, Write
from tests.evals.conftest import serve as serve

Evaluate = Callable[..., int]


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


@pytest.mark.parametrize(("engine", "other"), [("sglang", "triton"), ("vllm", "emulation")])
def test_two_kernels_one_after_the_other(
    variant: Write, evaluate: Evaluate, tmp_path: Path, engine: str, other: str
) -> None:
    trace = tmp_path / "trace"
    fake = ("--trace", str(trace), *(("--format", "nvfp4") if engine == "vllm" else ()))
    code = evaluate(variant(engine, other, fake), variant(engine, "flashinfer_trtllm", fake), "--sequential",
                    "--require-attestation")
    assert code == 0
    found = report(tmp_path / "run")
    assert found["state"] == "PASS" and set(found["integrity"]["attestation"].values()) == {"attested"}
    notes = [f["message"] for f in found["integrity"]["findings"] if f["code"] == "kernel-attested"]
    assert any(f"{other} by" in n for n in notes) and any("flashinfer_trtllm by" in n for n in notes)
    lines = [line.split()[0] for line in trace.read_text().splitlines()]
    assert lines == ["start", "stop", "start", "stop"]  # never two servers on the GPUs
    block = (tmp_path / "run" / "report.md").read_text()
    assert f"kernels: baseline {other} by" in block and "candidate flashinfer" in block


def test_before_and_after_with_a_worse_candidate(variant: Write, evaluate: Evaluate, tmp_path: Path) -> None:
    code = evaluate(variant("sglang", name="before"), variant("sglang", name="after", fake=("--wrong", "0.9")),
                    "--margin", "1.5", "--limit", "60")
    assert code == 1 and report(tmp_path / "run")["state"] == "FAIL"


@pytest.mark.parametrize(("engine", "fake", "message"), [
    ("sglang", ("--runs", "triton"), "flashinfer_trtllm was asked for, the server runs triton (/server_info"),
    ("sglang", ("--runs", "triton", "--old-routes"), "triton (/get_server_info"),
    ("vllm", ("--runs", "marlin"), "flashinfer_trtllm was asked for, the server runs marlin (log, chosen)"),
    ("sglang", ("--tp-size", "4"), "tensor parallel size is 4, 1 was asked for"),
])
def test_another_kernel_is_invalid_before_anything_is_asked(
    variant: Write, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str,
    fake: tuple[str, ...], message: str,
) -> None:
    assert evaluate(variant(engine, name="good"), variant(engine, name="bad", fake=fake)) == 4
    assert message in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run" / "items.jsonl").read_text().splitlines()]
    assert {r["arm"].split("#")[0] for r in rows} == {"baseline"}


def test_a_fallback_while_answering_is_invalid(variant: Write, evaluate: Evaluate, tmp_path: Path) -> None:
    assert evaluate(variant("vllm", name="good"), variant("vllm", name="bad", fake=("--fallback-after", "10"))) == 4
    found = report(tmp_path / "run")
    assert found["state"] == "INVALID"
    (finding,) = [f for f in found["integrity"]["findings"] if f["severity"] == "invalid"]
    assert finding["code"] == "kernel-fallback" and "falling back to triton" in finding["message"]


def test_a_crash_while_loading_shows_the_logs_tail(
    variant: Write, evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB."
    assert evaluate(variant("sglang", name="good"), variant("sglang", name="bad", fake=("--crash", crash))) == 2
    said = capsys.readouterr().err
    assert "the server for 'bad' did not start: torch.OutOfMemoryError" in said and "exit code 1" in said
    assert "  | Traceback (most recent call last):" in said and "  | [2026-12-02 10:00:00] server_args=" in said


def test_a_slow_start_is_waited_for_and_a_hopeless_one_is_not(
    variant: Write, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slow = ("--slow", "2")  # a second of refused connections, a second of 503
    assert evaluate(variant("sglang", name="slow", fake=slow), variant("sglang", name="other")) == 0
    late = variant("sglang", name="late", fake=("--slow", "60"), ready={"timeout": 1.5})
    assert evaluate(variant("sglang", name="good"), late, out=tmp_path / "late") == 2
    assert "was not ready after 1.5 s" in capsys.readouterr().err


def test_quirks_do_not_become_findings(variant: Write, evaluate: Evaluate, tmp_path: Path) -> None:
    """SGLang against vLLM: other error bodies, `matched_stop` as an id, `reasoning_content` null, extra fields."""
    code = evaluate(
        variant("sglang", fake=("--fault", "503@5", "--fault", "429@9", "--fault", "drop@11")),
        variant("vllm", fake=("--fault", "500@3-4",)), "--endpoint", "chat",
    )
    assert code == 0
    found = report(tmp_path / "run")
    assert [f for f in found["integrity"]["findings"] if f["severity"] in ("invalid", "inconclusive")] == []


def test_empty_and_null_answers_are_counted(variant: Write, evaluate: Evaluate, tmp_path: Path) -> None:
    code = evaluate(variant("vllm", name="a"), variant("vllm", name="b", fake=("--fault", "empty@40%")))
    assert code in (1, 4)  # empties differ: never PASS
    assert any(r["status"] == "empty" for r in map(json.loads, (tmp_path / "run/items.jsonl").read_text().splitlines()))


def test_only_one_arm_then_resume_with_the_other(
    variant: Write, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the compose files do: one server, its answers, the other server, the verdict."""
    files = variant("sglang", name="a"), variant("sglang", name="b")
    assert evaluate(*files, "--only", "baseline") == 0
    assert "nothing judged. Go on with:" in capsys.readouterr().out
    assert not (tmp_path / "run" / "report.json").exists()
    assert evaluate(*files, "--resume") == 0
    assert report(tmp_path / "run")["state"] == "PASS"


def test_another_image_cannot_take_over_answers(variant: Write, evaluate: Evaluate, tmp_path: Path) -> None:
    assert evaluate(variant("sglang", name="a"), variant("sglang", name="b"), "--only", "baseline") == 0
    text = (tmp_path / "run" / "run.json").read_text()
    assert '"kernels": [\n' in text and '"image": null' in text
    with_other = variant("sglang", "triton", name="a")
    assert evaluate(with_other, variant("sglang", name="b"), "--resume", "--only", "baseline") == 0  # complete already
    rows = (tmp_path / "run" / "items.jsonl").read_text().splitlines()
    (tmp_path / "run" / "items.jsonl").write_text("\n".join(rows[:-3]) + "\n")
    assert evaluate(with_other, variant("sglang", name="b"), "--resume", "--only", "baseline") == 2


def test_side_by_side_needs_halves(
    variant: Write, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a, b = variant("sglang", name="a", gpus="0-3"), variant("sglang", name="b", gpus="3-6")
    assert evaluate(a, b, "--parallel-servers") == 2
    assert "candidate and baseline both use GPU 3; drop --parallel-servers" in capsys.readouterr().err
    b = variant("sglang", name="b", gpus="4-7")
    assert evaluate(a, b, "--parallel-servers") == 0
    c = variant("sglang", name="c", gpus="4-7", sequential=True)
    assert evaluate(a, c, "--parallel-servers", out=tmp_path / "other") == 2
    assert "says sequential: true" in capsys.readouterr().err


def test_a_files_protocol_is_used_and_can_be_overridden(
    variant: Write, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from evals.cli import main

    wanted = {"endpoint": "chat", "shots": 3, "max_tokens": 512, "chat_template_kwargs": {"enable_thinking": False}}
    files = ["--baseline-file", str(variant("sglang", name="a", protocol=wanted)),
             "--candidate-file", str(variant("sglang", name="b", protocol=wanted))]
    base = ["run", "gsm8k", *files, "--data", str(data_dir), "--limit", "8", "--no-aa", "--margin", "60"]
    main([*base, "--out", str(tmp_path / "one"), "--shots", "2"])
    protocol = json.loads((tmp_path / "one" / "run.json").read_text())["protocol"]
    assert (protocol["endpoint"], protocol["max_tokens"]) == ("chat", 512)
    assert protocol["chat_template_kwargs"] == {"enable_thinking": False}
    assert "note: shots is 2" in capsys.readouterr().err


def test_files_that_disagree_on_the_protocol(
    variant: Write, evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    a = variant("sglang", name="a", protocol={"endpoint": "chat"})
    b = variant("sglang", name="b", protocol={"endpoint": "completions"})
    assert evaluate(a, b) == 2
    assert "expects endpoint chat" in capsys.readouterr().err
    assert evaluate(a, b, "--endpoint", "completions") == 0


def test_a_running_server_by_url_with_its_log(
    variant: Write, evaluate: Evaluate, tmp_path: Path, data_dir: Path
) -> None:
    """As in the compose files: launched by somebody else, log on a shared volume."""
    from evals.servers import Launch, Server

    command = f"{sys.executable} {FAKE} vllm --gold {data_dir} --model-path m --port {{port}} --moe-backend triton"
    log = tmp_path / "shared.log"
    with Server(Launch("v", "m", log, command, startup_timeout=20)) as server:
        data = {"name": "by-url", "engine": "vllm", "kernel": "triton", "url": server.url, "attest": {"log": str(log)}}
        path = tmp_path / "url.yaml"
        path.write_text(yaml.safe_dump(data))
        assert evaluate(path, variant("vllm", "triton"), "--require-attestation") == 0
        path.write_text(yaml.safe_dump(data | {"attest": {}}))  # without the log nothing proves it
        assert evaluate(path, variant("vllm", "triton"), out=tmp_path / "b") == 4


def test_a_container_is_removed_even_when_its_client_was_killed(
    variant: Write, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path
) -> None:
    """A stand-in for docker that runs the command here and notes how it was called."""
    calls, folder = tmp_path / "calls", tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(
        f"#!{sys.executable}\nimport os, sys\nopen({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        "if sys.argv[1] == 'run':\n    a = sys.argv\n    i = a.index('--entrypoint')\n"
        "    os.execvp(a[i + 1], [a[i + 1], *a[i + 3:]])\n"
    )
    (folder / "docker").chmod(stat.S_IRWXU)
    import os

    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    a = variant("sglang", name="a", image="lmsysorg/sglang:before", gpus="0-1")
    b = variant("sglang", name="b", image="lmsysorg/sglang:after", gpus="0-1")
    assert evaluate(a, b) == 0
    lines = calls.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["run", "rm", "run", "rm"]
    name = lines[0].split("--name ")[1].split()[0]
    assert lines[1] == f"rm --force {name}" and "lmsysorg/sglang:before" in lines[0]
    images = {e["identity"]["image"] for e in json.loads((tmp_path / "run/run.json").read_text())["arms"].values()}
    assert images == {"lmsysorg/sglang:before", "lmsysorg/sglang:after"}


def test_dry_run_starts_nothing(
    variant: Write, evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    assert evaluate(variant("sglang", fake=("--trace", str(trace))), variant("vllm"), "--dry-run") == 0
    text = capsys.readouterr().out
    assert "# baseline: sglang-flashinfer_trtllm" in text and "--moe-backend flashinfer_trtllm" in text
    assert "one server after the other" in text and not trace.exists() and not (tmp_path / "run").exists()


def test_layers_refuse_files_with_the_remedy(variant: Write, capsys: pytest.CaptureFixture[str]) -> None:
    from evals.cli import main

    path = str(variant("sglang"))
    assert main(["run", "logprobs", "--baseline-file", path, "--candidate-file", path]) == 2
    assert "start the server and give its URL" in capsys.readouterr().err


def test_our_own_service_is_attested_by_its_fingerprint(
    serve: Callable[..., tuple[Any, str]], evaluate: Evaluate, tmp_path: Path
) -> None:
    paths = []
    for name, kernel, runs in (("a", "fp8/a", "fp8/a"), ("b", "fp8/b", "fp8/b"), ("c", "fp8/b", "fp8/other")):
        _, url = serve(variant=runs)
        data = {"name": name, "engine": "service", "kernel": kernel, "url": url}
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(data))
    assert evaluate(paths[0], paths[1], "--require-attestation") == 0
    assert set(report(tmp_path / "run")["integrity"]["attestation"].values()) == {"attested"}
    assert evaluate(paths[0], paths[2], out=tmp_path / "other") == 4
    findings = report(tmp_path / "other")["integrity"]["findings"]
    assert any("was to run fp8/b, its server says fp8/other" in f["message"] for f in findings)
