"""`evals plan`: numbers of the reference table, refusals, and the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evals.errors import UsageError
from evals.plan import plan, render


def test_the_reference_case() -> None:
    answer = plan(1, 0.04)
    assert answer.items == 2474 and answer.repeats == 2
    assert answer.attainable == pytest.approx(1.37, abs=0.006)
    assert answer.attainable_equivalence == pytest.approx(1.61, abs=0.006)
    assert answer.detectable == pytest.approx(1.37, abs=0.006)
    assert answer.power_if_equal == pytest.approx(0.55, abs=0.01)
    assert answer.flag_if_margin_worse == pytest.approx(0.57, abs=0.01)
    text = render(answer)
    assert "2474 items" in text and "--repeats 2" in text
    assert " ".join(text.split()).count("1237") == 1  # the table's 2 % column


def test_enough_items_and_deterministic_servers() -> None:
    text = render(plan(1.5, 0.04))
    assert "1319 items are enough in one pass" in text
    zero = plan(1.5, 0.0)
    assert zero.items == 178 and zero.power_if_equal == 1.0
    assert plan(1.5, 0.0, n=100).power_if_equal == 0.0


def test_a_true_drop_costs() -> None:
    assert plan(1.5, 0.04, true_drop=0.5).items > 2 * plan(1.5, 0.04).items
    assert plan(1.5, 0.04, true_drop=0.5).power_if_equal < plan(1.5, 0.04).power_if_equal


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"margin": 0, "discordance": 0.04}, "--margin"),
        ({"margin": 1, "discordance": 4}, "--discordance"),
        ({"margin": 1, "discordance": 0.04, "n": 0}, "--n"),
        ({"margin": 1, "discordance": 0.04, "alpha": 0.9}, "--alpha"),
        ({"margin": 1, "discordance": 0.04, "power": 1.0}, "--power"),
        ({"margin": 1, "discordance": 0.04, "true_drop": 1.0}, "cannot be shown"),
        ({"margin": 3, "discordance": 0.01, "true_drop": 2.0}, "discordance of at least"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, float], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        plan(**arguments)  # type: ignore[arg-type]


def test_command_line() -> None:
    command = [sys.executable, "-m", "evals.cli", "plan"]
    done = subprocess.run([*command, "--margin", "1", "--discordance", "0.04"], capture_output=True, text=True)
    assert done.returncode == 0 and "2474 items" in done.stdout
    bad = subprocess.run([*command, "--margin", "-1"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.startswith("evals: --margin") and bad.stderr.count("\n") == 1
