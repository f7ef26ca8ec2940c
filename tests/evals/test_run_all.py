"""`evals run all`: order of layers, attribution, early stop at a gross failure, what is stored for --resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals import layers
from evals.cli import main
from evals.forced.collect import Comparison
from evals.forced.records import RoutingTrace, Scores
from evals.forced.run import Forced
from evals.rules import LayerEvidence


def scored(ids: np.ndarray, logprob: float = -0.1, name: str = "x") -> Scores:
    n = ids.shape[0]
    top = np.full((n, 1), logprob)
    own = np.full(n, logprob)
    own[0] = np.nan
    trace = RoutingTrace(ids, (1,), np.ones((n, 1)))
    return Scores(name, np.zeros(n, int), own, np.zeros((n, 1), int), top, ("t",) * n, 1, trace)


def forced(name: str, label: str, *, flips: bool = False, worse: float = 0.0, failure: str | None = None) -> Forced:
    """A candidate with other experts in a tenth of the tokens, or less likely gold tokens, or none at all."""
    total = Comparison(routed=True)
    for text in range(3):
        ids = np.tile(np.arange(4), (500, 1, 1))
        other = ids.copy()
        if flips:
            other[:50, 0, 0] = 9
        a, b = scored(ids, name=str(text)), scored(other, -0.1 - worse, name=str(text))
        total.gold.add(a, b)
        total.routing.add(a, b)
    return Forced(name, label, None if failure else total, None, True, (), failure)


def check(*bad: tuple[str, str, Any]) -> dict[str, Any]:
    """A kernel report with these (probe, cause, value) findings failing."""
    def finding(probe: str, ok: bool, value: Any, cause: str = "") -> dict[str, Any]:
        return {"layer": 1, "probe": probe, "tokens": 8, "ok": ok, "value": value, "limit": 1e-3, "detail": "because",
                "cause": cause}

    return {"findings": [finding("contract", True, 0.0), finding("parity", True, 1e-6),
                         *[finding(p, False, v, c) for p, c, v in bad]]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `evals run all` with made-up layers; returns (exit code, arms whose accuracy was run, folder)."""

    def go(report: dict[str, Any] | None, measured: dict[str, Any], *candidates: str, extra: list[str] | None = None):
        ran: list[str] = []
        asked: list[str] = []

        def measure(options: Any, *_: Any) -> list[Forced]:
            asked.extend(a.name for a in options.arms[1:])
            return [forced(a.name, a.label, **measured.get(a.label, {})) for a in options.arms[1:]]

        def accuracy(options: Any, formats: Any) -> int:
            ran.extend(a.label for a in options.arms)
            return 5

        monkeypatch.setattr("evals.commands.all.kernel_check", lambda *_: (report, "no GPU"))
        monkeypatch.setattr("evals.forced.run.measure", measure)
        monkeypatch.setattr("evals.run.main", accuracy)
        argv = ["run", "all", "--model", "mini", "--baseline", "fp8/emulated", "--quiet"]
        argv += ["--out", str(tmp_path / "run")]
        for c in candidates or ("fp8/emulated:bias=bf16",):
            argv += ["--candidate", c]
        return main([*argv, *(extra or [])]), ran, asked, tmp_path / "run"

    return go


def rows(folder: Path, name: str = "candidate") -> dict[str, LayerEvidence]:
    return {e.layer: e for e in layers.load(folder)[name]}


def test_nothing_moves(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, ran, _, folder = run(check(), {})
    assert code == 5 and ran == ["fp8/emulated", "fp8/emulated:bias=bf16"]  # the code is the accuracy run's
    found = rows(folder)
    assert list(found) == ["contract", "kernel", "routing", "logprobs"] and not any(e.moved for e in found.values())
    assert found["routing"].svg is not None
    assert "look at" not in capsys.readouterr().out


def test_kernel_failures_by_routing_are_routings(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    variant = "fp8/emulated:bias=bf16"
    _, _, _, folder = run(check(("parity", "routing", 0.2)), {variant: {"flips": True}})
    found = rows(folder)
    assert found["routing"].moved and not found["kernel"].moved
    assert "routing is what moved" in found["kernel"].detail
    assert "bias" in capsys.readouterr().out  # what to look at


@pytest.mark.parametrize(("cause", "flips"), [("", True), ("routing", False)])
def test_kernel_failures_of_other_kinds_stay(run: Any, cause: str, flips: bool) -> None:
    variant = "fp8/emulated:bias=bf16"
    _, _, _, folder = run(check(("extreme-logits", cause, 0.2)), {variant: {"flips": flips}})
    assert rows(folder)["kernel"].moved


@pytest.mark.parametrize("probe", ["contract", "parity"])
def test_broken_contract_or_nan_stops_before_any_server(
    run: Any, probe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran, asked, folder = run(check((probe, "", "nan")), {})
    assert (code, ran, asked) == (1, [], [])
    assert rows(folder)["contract" if probe == "contract" else "kernel"].moved
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("how", [{"worse": 2.0}, {"failure": "item 7: HTTP 500: logits are NaN"}])
def test_a_broken_candidate_is_not_asked_for_answers(run: Any, how: dict[str, Any]) -> None:
    code, ran, _, folder = run(check(), {"fp8/emulated:bias=bf16": how})
    assert (code, ran) == (1, [])
    assert rows(folder)["logprobs"].moved


def test_other_candidates_go_on(run: Any) -> None:
    good, bad = "fp8/emulated:scales=copied", "fp8/emulated:bias=bf16"
    code, ran, _, folder = run(check(), {bad: {"worse": 2.0}}, bad, good)
    assert code == 1 and ran == ["fp8/emulated", good]
    assert set(layers.load(folder)) == {"candidate", "candidate:2"}


def test_resume_takes_the_stored_layers(run: Any) -> None:
    run(check(), {})
    code, ran, asked, _ = run(check(("contract", "", 1.0)), {}, extra=["--resume"])
    assert code == 5 and len(ran) == 2 and asked == []


def test_without_a_kernel_check_the_other_layers_are_measured(run: Any) -> None:
    _, ran, asked, folder = run(None, {})
    assert asked == ["candidate"] and len(ran) == 2
    assert list(rows(folder)) == ["routing", "logprobs"]
