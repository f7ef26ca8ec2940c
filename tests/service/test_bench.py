"""`service bench`: statistics against known answers, engines and servers on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from service.__main__ import main
from service.bench import rounds
from service.bench.rounds import Answered, Load, compare, measure, paired_ratio
from tests.service.conftest import FakeServer
from tests.service.test_gpu_random import CONFIG


class Clockwork:
    """Answers at known times: first token after 10 ms, then one every `gap` seconds."""

    vocab = 100

    def __init__(self, name: str, gap: float) -> None:
        self.name, self.gap, self.loads = name, gap, []

    def run(self, load: Load) -> list[Answered]:
        self.loads.append(load)
        return [Answered(5.0, [5.01 + i * self.gap for i in range(load.output)], load.output) for _ in load.prompts]


def test_round_is_arithmetic() -> None:
    """Four requests of 11 tokens, 20 ms apart, at once: 50 tok/s each, 44 tokens in 0.21 s."""
    one = measure(Clockwork("a", 0.02), Load([[1]] * 4, 11, 4))
    assert one.decode_tok_s == pytest.approx(200.0) and one.tok_s == pytest.approx(44 / 0.21) and one.tokens == 44
    assert one.ttft_ms["p50"] == pytest.approx(10.0) and one.itl_ms["p99"] == pytest.approx(20.0) and one.errors == 0


def test_failed_requests_count() -> None:
    class Failing(Clockwork):
        def run(self, load: Load) -> list[Answered]:
            return [*super().run(load), Answered(5.0, [], 0, "refused")]

    assert measure(Failing("f", 0.1), Load([[1]], 3, 1)).errors == 1


def test_rounds_alternate_with_equal_prompts() -> None:
    order: list[str] = []
    a, b = Clockwork("a", 0.010), Clockwork("b", 0.011)
    found = compare([a, b], 7, 5, 2, 3, 4, warmup=0, say=lambda name, _: order.append(name))
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [load.prompts for load in a.loads] == [load.prompts for load in b.loads]
    assert all(len(load.prompts) == 3 and len(load.prompts[0]) == 7 for load in a.loads)
    assert found.decode_ratio is not None and found.decode_ratio.ratio == pytest.approx(1.1)
    assert found.decode_ratio.low == pytest.approx(found.decode_ratio.high)


def test_ratio_is_a_paired_t_interval() -> None:
    """Against scipy's own paired test on logarithms; about 95 % of intervals hold the true ratio."""
    source = np.random.default_rng(0)
    a, b = source.lognormal(3.0, 0.02, 6), source.lognormal(2.98, 0.02, 6)
    got = paired_ratio(a.tolist(), b.tolist())
    want = stats.ttest_rel(np.log(a), np.log(b)).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((np.exp(want.low), np.exp(want.high)))
    inside = 0
    for _ in range(400):
        drift = source.normal(0, 0.1, 5)  # common to both of a pair
        x = paired_ratio(np.exp(drift + source.normal(0.018, 0.01, 5)).tolist(),
                         np.exp(drift + source.normal(0, 0.01, 5)).tolist())
        inside += x.low <= np.exp(0.018) <= x.high
    assert 0.92 < inside / 400 < 0.98
    with pytest.raises(ValueError, match="two or more pairs"):
        paired_ratio([1.0], [1.0])


def test_two_variants_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Own forward, shared weights: the whole command on a tiny random model."""
    config, out = tmp_path / "c.json", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    began = time.perf_counter()
    code = main(["bench", "--model", str(config), "--load-format", "random", "--variant", "fp8/emulated", "--variant",
                 "fp8/emulated:bias=bf16,scales=copied", "--input", "12", "--output", "6", "--concurrency", "1,3",
                 "--rounds", "3", "--json", str(out)])
    said = capsys.readouterr()
    assert code == 0 and "decoding" in said.out and "(3 pairs)" in said.out
    found = json.loads(out.read_text())
    assert found["weights"] == "shared" and found["engine"]["forward"] == "own"
    for result, concurrency in zip(found["results"], (1, 3), strict=True):
        for series in result["rounds"].values():
            assert [r["tokens"] for r in series] == [6 * concurrency] * 3 and all(r["errors"] == 0 for r in series)
            assert all(0 < r["seconds"] < time.perf_counter() - began for r in series)
        assert result["ratio"]["low"] <= result["ratio"]["ratio"] <= result["ratio"]["high"]


def test_against_a_server(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams over HTTP; a single target has no ratio."""
    code = main(["bench", "--url", server.url, "--vocab", "200", "--input", "5", "--output", "4", "--concurrency", "2",
                 "--requests", "4", "--rounds", "2", "--warmup", "0"])
    said = capsys.readouterr().out
    assert code == 0 and "pairs" not in said and server.url[:16] in said


@pytest.mark.parametrize(("arguments", "message"), [
    (["--url", "http://127.0.0.1:9", "--model", "mini"], "either --url or --model"),
    (["--model", "mini"], "needs one --variant"),
    (["--model", "mini", "--variant", "fp8/emulated", "--variant", "fp8/emulated"], "the same"),
    (["--model", "mini", "--variant", "fp8/emulated", "--concurrency", "0"], "positive numbers"),
])
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9"]) == 2
    assert "did not answer" in capsys.readouterr().err


def test_percentiles_of_nothing() -> None:
    assert rounds._percentiles([]) == {}
