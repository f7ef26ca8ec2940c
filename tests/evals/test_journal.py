"""The journal: durable rows, torn tails, strangers refused."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evals.errors import JournalError
from evals.journal import Journal, item_key, read


def line(item: str = "i1", key: str = "k", status: str = "completed", arm: str = "baseline", **more: Any) -> dict:
    return {"key": key, "arm": arm, "repeat": 0, "item": item, "status": status, "text": "t", **more}


def test_written_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.append([line("a"), line("b", text="é\u2028\n")])
        assert path.read_bytes().count(b"\n") == 2  # on the disk before append returns
    with Journal(path) as journal:
        assert journal.get("baseline", 0, "b", "k")["text"] == "é\u2028\n"
        assert journal.missing("baseline", 0, [("a", "k"), ("c", "k"), ("b", "k")]) == ["c"]
    assert [r["item"] for r in read(path)] == ["a", "b"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, 400))
def test_any_torn_tail_is_cut_off_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    rows = [line(f"i{n}", text="x" * n) for n in range(5)]
    whole = "".join(json.dumps(r) + "\n" for r in rows).encode()
    path = tmp_path / "j"
    path.write_bytes(whole[: min(cut, len(whole))])
    with Journal(path) as journal:
        kept = [r["item"] for r in journal]
        journal.append([line("new")])
    complete = whole[: min(cut, len(whole))].count(b"\n")
    assert kept == [f"i{n}" for n in range(complete)]
    assert [r["item"] for r in read(path)] == [*kept, "new"]


def test_damage_elsewhere_is_an_error_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(json.dumps(line("a")) + "\n{broken\n" + json.dumps(line("b")) + "\n")
    with pytest.raises(JournalError, match=r"j:2 is damaged"), Journal(path):
        pass
    with pytest.raises(JournalError, match=r"j:2 is damaged"):
        read(path)


def test_another_key_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append([line("a", key="one")])
        with pytest.raises(JournalError, match="another variant, weights, version or prompt"):
            journal.get("baseline", 0, "a", "two")
        assert journal.get("candidate", 0, "a", "two") is None  # another arm never answers


def test_errors_are_not_final_and_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.append([line("a", key="one", status="error")])
        assert journal.get("baseline", 0, "a", "two") is None
        journal.append([line("a", key="two")])
        assert journal.get("baseline", 0, "a", "two")["status"] == "completed"
    assert len(read(path)) == 1


def test_second_answer_for_an_item_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text((json.dumps(line("a")) + "\n") * 2)
    with pytest.raises(JournalError, match="a second time"), Journal(path):
        pass


def _try_open(path: Path, result: Any) -> None:
    try:
        with Journal(path):
            result.put("opened")
    except JournalError as error:
        result.put(str(error))


def test_two_processes_cannot_share_a_journal(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    with Journal(tmp_path / "j"):
        process = context.Process(target=_try_open, args=(tmp_path / "j", result))
        process.start()
        assert "in use by another" in result.get(timeout=20)
        process.join()


def test_key_depends_on_everything_but_order() -> None:
    body = {"prompt": "p", "model": "m", "max_tokens": 5, "temperature": 0.0, "seed": 1, "stop": ["x"]}
    who = {"asked": "fp8/a", "variant": {"requested": "fp8/a"}, "weights_sha256": "w", "versions": {"torch": "2"}}
    key = item_key("p", body, who)
    assert key == item_key("p", dict(reversed(body.items())), dict(reversed(who.items())))
    others = [item_key("q", body, who)]
    others += [item_key("p", body | {k: v}, who) for k, v in
               [("model", "n"), ("max_tokens", 6), ("temperature", 0.1), ("seed", 2), ("stop", []), ("top_p", 1)]]
    others += [item_key("p", body, who | {k: v}) for k, v in
               [("asked", "fp8/b"), ("variant", {"requested": "fp8/a", "resolved": {}}), ("weights_sha256", "v"),
                ("versions", {"torch": "3"})]]
    assert len({key, *others}) == len(others) + 1
