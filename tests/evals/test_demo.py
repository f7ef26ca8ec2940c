"""The demo's two command lines: the same pair and items, read by the real parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals import cli, demo


@pytest.mark.parametrize("limit", [None, 7])
def test_both_steps_compare_the_same_pair(limit: int | None) -> None:
    run = demo.arguments("mini", None, limit)
    routing = demo.routing_arguments(run)
    parser = cli.build_parser("run")
    a, b = parser.parse_args(run), parser.parse_args(routing)
    assert (a.task, b.task, b.items) == ("gsm8k-mini", "routing", "gsm8k-mini")
    assert (a.baseline, a.candidate, a.model) == (b.baseline, b.candidate, b.model)
    assert a.baseline == demo.BEFORE and a.limit == (limit or demo.ITEMS["mini"]) and b.limit == demo.ROUTING_ITEMS


def test_items_that_do_not_exist_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.arguments(str(tmp_path), str(tmp_path / "none.jsonl"), None)
    assert stopped.value.code == 2 and "none.jsonl does not exist" in capsys.readouterr().err
