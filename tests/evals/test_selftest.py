"""The self-test: one service with the embedded model in self-test mode, a few faults, and the doors kept shut."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from evals.client import Endpoint
from evals.commands.all import kernel_evidence
from evals.forced.collect import Comparison
from evals.integrity import check_server
from evals.selftest import QUICK
from evals.selftest_alarms import simulate
from evals.selftest_bench import Bench, Measured, Sizes
from evals.selftest_judge import Row, judge_row
from evals.selftest_report import Matrix, row_dict, write_json, write_markdown
from service.api.app import create_app
from service.api.state import ApiSettings, Service

SIZES = Sizes(texts=3, long=0, answers=4, repeats=1, answer_caught=False, max_tokens=150)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """FP8 on the embedded model, a few texts."""
    with Bench("fp8", "mini", tmp_path_factory.mktemp("selftest"), SIZES) as running:
        yield running


@pytest.fixture(scope="module")
def sound(bench: Bench) -> dict[str, Any]:
    bench.switch(None)
    return bench.check()


@pytest.fixture(scope="module")
def floor(bench: Bench, sound: dict[str, Any]) -> Comparison:
    bench.switch(None)
    return bench.forced(width=1)


def row_of(bench: Bench, name: str, sound: dict[str, Any], floor: Comparison) -> Row:
    fault = next(f for f in bench.faults if f["name"] == name)

    def caught(seen: Measured) -> bool:
        return bool(judge_row(fault, "fp8", seen, floor, None, sound).caught) or not fault["harmful"]

    seen = bench.measure(name, caught=caught)
    return judge_row(fault, "fp8", seen, floor, bench.answers, sound)


# ---- closed in a normal run ---------------------------------------------------------------------------------------


def test_selftest_needs_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from service.__main__ import main

    monkeypatch.delenv("MOE_PARITY_SELFTEST", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["--model", "mini", "--variant", "fp8/emulated", "--selftest"])
    assert stop.value.code == 2 and "MOE_PARITY_SELFTEST=1" in capsys.readouterr().err


def test_a_normal_service_has_no_such_routes() -> None:
    names = {"model_name": "m", "model_path": "/m", "variant": "fp8/emulated"}
    plain = create_app(Service(ApiSettings(**names)))
    inside = create_app(Service(ApiSettings(**names, selftest=True)))

    def paths(app: Any) -> set[str]:
        return {p for p in app.openapi()["paths"] if p.startswith("/selftest")}

    assert paths(plain) == set()
    assert paths(inside) == {"/selftest/faults", "/selftest/fault", "/selftest/check"}


def test_a_normal_service_imports_no_fault() -> None:
    code = ("import sys, service.__main__, service.api.launch, service.engine.engine, evals.cli, evals.commands.run;"
            "shut = ('moe_kernels.faults', 'service.selftest', 'evals.selftest');"
            "print([m for m in sys.modules if m.startswith(shut)])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_normal_run_refuses_a_server_in_self_test_mode(bench: Bench) -> None:
    bench.switch(None)
    said = httpx.get(bench.endpoint.url("/fingerprint")).json()
    assert said["faults"] == []
    (finding,) = [f for f in check_server("candidate", "fp8/emulated", said, said) if f.severity == "invalid"]
    assert finding.code == "selftest-server" and "--selftest" in finding.message


# ---- switching ----------------------------------------------------------------------------------------------------


def test_the_fingerprint_names_the_fault_and_its_id_changes(bench: Bench) -> None:
    url = bench.endpoint.url("/fingerprint")
    bench.switch(None)
    before = httpx.get(url).json()
    bench.switch("bias_bf16")
    during = httpx.get(url).json()
    bench.switch(None)
    after = httpx.get(url).json()
    assert during["faults"] == ["bias_bf16"] and during["id"] != before["id"] == after["id"]


@pytest.mark.parametrize(("name", "said"), [("nope", "unknown fault 'nope'"), ("one_scalar", "nvfp4/emulated")])
def test_what_cannot_be_switched_on_is_refused_and_nothing_stays_on(bench: Bench, name: str, said: str) -> None:
    reply = httpx.post(bench.endpoint.url("/selftest/fault"), json={"name": name})
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]
    assert httpx.get(bench.endpoint.url("/selftest/faults")).json()["on"] is None


def test_not_while_requests_run(bench: Bench) -> None:
    body = {"prompt": "Question: How many?\nAnswer:", "max_tokens": 300, "ignore_eos": True, "temperature": 0,
            "stream": True}
    with httpx.stream("POST", bench.endpoint.url("/v1/completions"), json=body, timeout=60) as running:
        lines = running.iter_lines()  # kept: a dropped iterator closes the stream
        next(lines)
        reply = httpx.post(bench.endpoint.url("/selftest/fault"), json={"name": "bias_bf16"}, timeout=60)
    assert reply.status_code == 409
    assert httpx.get(bench.endpoint.url("/selftest/faults")).json()["on"] is None


# ---- what the layers see ------------------------------------------------------------------------------------------


def test_the_sound_server_repeats_itself_and_passes(bench: Bench, sound: dict[str, Any], floor: Comparison) -> None:
    assert sound["ok"] and floor.routed
    nothing = {"name": "A/A", "source": "", "summary": "", "harmful": False}
    bench.switch(None)
    row = judge_row(nothing, "fp8", Measured(check=sound, forced=bench.forced(3)), floor, None, sound)
    assert row.right and not row.caught


def test_bf16_bias_is_named_by_routing(bench: Bench, sound: dict[str, Any], floor: Comparison) -> None:
    row = row_of(bench, "bias_bf16", sound, floor)
    assert row.right and {"kernel", "routing"} <= set(row.caught)
    assert row.first == "routing"  # kernel parity fails only where other experts were chosen
    assert not {"logprobs", "length", "accuracy"} & set(row.caught)
    assert "sglang" not in row.others and "plain" not in row.others


@pytest.mark.parametrize(
    ("name", "layer"),
    [("dead_expert_scale", "contract"), ("scales_tma_read", "kernel"), ("shared_scaled", "routing"),
     ("w13_swapped", "logprobs"), ("kv_block_truncated", "logprobs"), ("overflow_nan", "logprobs"),
     ("wrong_eos", "length")],
)
def test_each_layer_catches_its_fault(
    bench: Bench, sound: dict[str, Any], floor: Comparison, name: str, layer: str
) -> None:
    row = row_of(bench, name, sound, floor)
    assert row.right and layer in row.caught, row


@pytest.mark.parametrize("name", ["logits_bf16", "noise_2"])
def test_benign_changes_pass(bench: Bench, sound: dict[str, Any], floor: Comparison, name: str) -> None:
    row = row_of(bench, name, sound, floor)
    assert row.right and not row.caught, row


def test_engine_faults_leave_nothing_behind(bench: Bench, floor: Comparison) -> None:
    for name in ("kv_block_truncated", "short_reasoning", "wrong_eos"):
        bench.switch(name)
    bench.switch(None)
    again = bench.forced(width=1)
    assert again.gold.summary().max_kl <= max(floor.gold.summary().max_kl, 1e-6)


def test_forced_run_refuses_it_with_exit_4(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from evals.cli import main

    url = bench.endpoint.base
    bench.switch(None)
    argv = ["run", "logprobs", "--baseline-url", url, "--candidate-url", url, "--items", "gsm8k-mini", "--limit", "2",
            "--shots", "0", "--long", "0", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(argv) == 4
    assert "self-test mode" in capsys.readouterr().out
    written = json.loads((tmp_path / "run" / "logprobs.json").read_text())
    (one,) = written["candidates"]
    assert one["state"] == "invalid" and one["candidate"]["gold"]["mean_kl"] < 1e-6
    assert one["evidence"]["moved"] is False
    assert (tmp_path / "run" / "logprobs.html").read_text().startswith("<!DOCTYPE html>")
    assert not list((tmp_path / "run").glob("*.spool"))
    assert main(argv) == 2 and "choose another --out" in capsys.readouterr().err


# ---- judging and reporting ----------------------------------------------------------------------------------------


def test_kernel_evidence_separates_contract_and_finds_nan() -> None:
    def finding(probe: str, ok: bool, value: Any = 0.0) -> dict[str, Any]:
        return {"layer": 3, "probe": probe, "tokens": 8, "ok": ok, "value": value, "limit": 1.0, "detail": "why"}

    calm, gross = kernel_evidence({"findings": [finding("contract", True), finding("parity", True, 1e-5)]})
    assert [e.layer for e in calm] == ["contract", "kernel"] and not any(e.moved for e in calm) and gross is None
    moved, gross = kernel_evidence({"findings": [finding("contract", True), finding("parity", False, 0.3)]})
    assert [e.moved for e in moved] == [False, True] and gross is None
    _, gross = kernel_evidence({"findings": [finding("parity", False, "nan")]})
    assert gross == "kernel: why"
    _, gross = kernel_evidence({"findings": [finding("contract", False, 1.0)]})
    assert gross == "contract: why"


def matrix(*rows: Row) -> Matrix:
    return Matrix(rows, (), "mini", SIZES, 1.0)


def test_the_matrix_is_right_only_if_every_row_is(tmp_path: Path) -> None:
    caught = Row("a", "src #1", "x", "fp8", True, 3, caught={"routing": "9 % flips"}, seconds={"forced": 2.5},
                 items={"routing": 4})
    missed = Row("b", "src #2", "y", "fp8", True, measured={"kernel": "calc_diff 0"})
    benign = Row("c", "src #3", "z", "fp8", False)
    alarm = Row("d", "src #4", "z", "fp8", False, caught={"kernel": "calc_diff 1"})
    assert matrix(caught, benign).right
    assert not matrix(caught, missed).right and not matrix(caught, alarm).right
    entry = row_dict(caught)
    assert (entry["layer_caught"], entry["effect"]) == ("routing", "9 % flips")
    assert (entry["items"], entry["seconds"]) == (4, 2.5)
    write_json(matrix(caught, missed), tmp_path / "m.json")
    rows = json.loads((tmp_path / "m.json").read_text())
    assert {"fault", "source", "harmful", "layer_caught", "effect", "items", "seconds", "others_caught"} <= set(rows[0])
    write_markdown(matrix(caught, benign, missed), tmp_path / "m.md")
    text = (tmp_path / "m.md").read_text()
    assert "1 of 2 harmful faults caught (missed: b)" in text and "| `c` (benign) |" in text


def test_quick_has_twelve_faults_and_three_benign_changes(bench: Bench) -> None:
    kinds = {f["name"]: f["harmful"] for f in bench.faults}
    assert sum(kinds[n] for n in QUICK) == 12 and len(QUICK) == 15


def test_a_server_that_repeats_itself_never_alarms() -> None:
    calm = simulate(0.0)
    assert (calm.runs, calm.failed, calm.changed) == (200, 0, 0)
    noisy = simulate(0.04)
    assert noisy.failed <= 24  # the level is 5 % of 200 = 10, 24 is far in the tail
    assert simulate(0.04, alpha=0.001).failed <= 2


def test_unknown_faults_are_a_usage_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from evals import selftest
    from evals.errors import UsageError

    class Fake:
        faults = [{"name": "x", "formats": ["fp8"]}]

        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("evals.selftest_bench.Bench", Fake)
    parser = argparse.ArgumentParser()
    selftest.add_arguments(parser)
    with pytest.raises(UsageError, match="unknown fault 'nope'; known: x"):
        selftest.main(parser.parse_args(["--fault", "nope", "--quiet"]))


def test_endpoint_and_threads_are_released(bench: Bench) -> None:
    assert isinstance(bench.endpoint, Endpoint)
    assert not [t for t in threading.enumerate() if "forced" in t.name]
