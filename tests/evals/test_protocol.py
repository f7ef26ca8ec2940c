"""The protocol's hash, its comparison field by field, and the data it stands on."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import data, protocol, tasks
from evals.errors import DataError, UsageError
from evals.protocol import Sampling, build, differences, undeclared
from evals.records import Protocol, item_id
from tests.evals.conftest import rows, write_jsonl


@pytest.fixture(scope="module")
def made(data_dir: Path) -> Protocol:
    spec = tasks.get("gsm8k")
    problems = data.select(spec.load(data_dir, None), shots=3, limit=10, seed=1)
    return build(spec, problems, Sampling())


CHANGES: dict[str, Any] = {
    "task": "other", "dataset_sha256": "0" * 64, "items": ("a",), "shots": 9, "shots_sha256": "0" * 64,
    "template_sha256": "0" * 64, "endpoint": "chat", "max_tokens": 7, "stops": ("x",), "temperature": 0.5,
    "seed": 2, "extractor": "x", "concurrency": 64, "lm_eval_version": "0", "task_version": "9", "top_p": 0.9,
    "chat_template_kwargs": {"enable_thinking": False}, "extra_body": {"a": 1}, "logprobs": True,
}


def test_every_field_changes_the_hash_and_is_found(made: Protocol) -> None:
    assert set(CHANGES) == {f.name for f in fields(Protocol)}  # a new field must be added here
    seen = {made.hash()}
    for name, value in CHANGES.items():
        other = replace(made, **{name: value})
        assert list(differences(made, other)) == [name]
        seen.add(other.hash())
    assert len(seen) == len(CHANGES) + 1


def test_round_trip_through_json(made: Protocol) -> None:
    again = Protocol.from_dict(json.loads(json.dumps(made.as_dict())))
    assert again == made and again.hash() == made.hash()


def test_every_undeclared_field_blocks_and_its_factor_allows(made: Protocol) -> None:
    for name, value in CHANGES.items():
        other = replace(made, **{name: value})
        assert undeclared(made, other, ()), name
        if name in ("task",):
            continue
        assert not undeclared(made, other, [protocol.factor_for(name)]), name


def test_factor_shots_does_not_cover_other_fields(made: Protocol) -> None:
    other = replace(made, shots=8, shots_sha256="0" * 64, max_tokens=7)
    assert list(undeclared(made, other, ["shots"])) == ["max_tokens"]


def test_unknown_factor_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown --factor 'shot'"):
        protocol.check_factors(["shot"])
    assert protocol.check_factors(["shots", "versions", "shots"]) == ("shots", "versions")


@pytest.mark.parametrize("change", [{"endpoint": "x"}, {"max_tokens": 0}, {"concurrency": 0}, {"temperature": -1}])
def test_impossible_settings_are_refused(data_dir: Path, change: dict[str, Any]) -> None:
    spec = tasks.get("gsm8k")
    problems = data.select(spec.load(data_dir, None), shots=0, limit=1, seed=1)
    with pytest.raises(UsageError):
        build(spec, problems, Sampling(**change))


def test_template_hash_depends_on_prompt_not_on_shots(data_dir: Path) -> None:
    spec = tasks.get("gsm8k")
    one = protocol.template_sha256(spec, Sampling())
    assert one == protocol.template_sha256(spec, Sampling(max_tokens=3))
    assert one != protocol.template_sha256(spec, Sampling(prefix="[gMASK]"))
    assert one != protocol.template_sha256(spec, Sampling(endpoint="chat"))


# --- data ---------------------------------------------------------------------------------------------


def test_official_files_are_recognised(gsm8k_dir: Path) -> None:
    raw = data.load_gsm8k(gsm8k_dir, None)
    assert raw.sha256 == "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
    assert (len(raw.test), len(raw.train), raw.label) == (1319, 7473, "GSM8K test (official file)")


def test_hub_rows_hash_like_the_official_file(gsm8k_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    train, test = (data.read_jsonl(gsm8k_dir / f"{name}.jsonl") for name in ("train", "test"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: {"train": train, "test": test})
    raw = data.load_gsm8k(None, None)
    assert raw.label == "GSM8K test (official file)" and len(raw.train) == 7473


def test_offline_hub_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"cannot load openai/gsm8k .* give --data DIR"):
        data.load_gsm8k(None, None)  # HF_DATASETS_OFFLINE=1 in tests


def test_limit_is_a_prefix_of_a_seeded_permutation(data_dir: Path) -> None:
    raw = data.load_gsm8k(data_dir, None)
    full = data.select(raw, shots=0, limit=None, seed=7).items
    assert data.select(raw, shots=0, limit=25, seed=7).items == full[:25]
    assert sorted(i.doc_id for i in full) == list(range(200))
    assert [i.doc_id for i in full] != list(range(200))
    assert data.select(raw, shots=0, limit=25, seed=8).items != full[:25]


@given(st.lists(st.text(min_size=1), unique=True, max_size=20), st.integers())
def test_order_follows_the_items_not_the_file(ids: list[str], seed: int) -> None:
    named = [ids[i] for i in data.order(ids, seed)]
    backwards = ids[::-1]
    assert named == [backwards[i] for i in data.order(backwards, seed)]


def test_ids_are_hashes_of_the_question(data_dir: Path) -> None:
    items = data.select(data.load_gsm8k(data_dir, None), shots=0, limit=None, seed=1).items
    raw = data.read_jsonl(data_dir / "test.jsonl")
    assert all(i.id == item_id(raw[i.doc_id]["question"]) and i.question == raw[i.doc_id]["question"] for i in items)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"question": "a", "answer": "#### 1"}\n{"question"', ":2 is not JSON"),
        ('{"question": "a"}\n', ":1 needs the text fields"),
        ("[1]\n", ":1 needs the text fields"),
        ("\n", "holds no problems"),
        ('{"question": "a", "answer": "1"}\n', "row 1 has no gold answer"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "a", "answer": "#### 2"}\n', "rows 1 and 2 ask the same"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(lines)
    with pytest.raises(DataError, match=message):
        data.select(data.load_gsm8k(file, None), shots=0, limit=None, seed=1)


@pytest.mark.parametrize(
    ("shots", "limit", "message"),
    [(0, 0, "--limit must be at least 1"), (0, -3, "--limit must"), (-1, None, "--shots must"), (31, None, "needs 31")],
)
def test_impossible_selection_is_refused(data_dir: Path, shots: int, limit: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        data.select(data.load_gsm8k(data_dir, None), shots=shots, limit=limit, seed=1)


def test_one_file_needs_another_for_shots(data_dir: Path) -> None:
    only = data.load_gsm8k(data_dir / "test.jsonl", None)
    with pytest.raises(UsageError, match="--train FILE, or use --shots 0"):
        data.select(only, shots=1, limit=None, seed=1)
    both = data.load_gsm8k(data_dir / "test.jsonl", data_dir / "train.jsonl")
    assert data.select(both, shots=2, limit=1, seed=1).shots[0]["question"].startswith("Person 1000 ")
    with pytest.raises(DataError, match="is the evaluated file"):
        data.load_gsm8k(data_dir / "test.jsonl", data_dir / "test.jsonl")


def test_platinum_file_with_its_extra_column(tmp_path: Path, data_dir: Path) -> None:
    lines = [{**row, "cleaning_status": "verified", "cleaned_answer": 1} for row in rows(20)]
    file = write_jsonl(tmp_path / "platinum.jsonl", lines)
    problems = data.select(data.load_gsm8k(file, data_dir / "train.jsonl"), shots=5, limit=None, seed=1)
    assert len(problems.items) == 20 and len(problems.shots) == 5


def test_problems_survive_the_run_folder(tmp_path: Path, data_dir: Path) -> None:
    problems = data.select(data.load_gsm8k(data_dir, None), shots=2, limit=9, seed=1)
    data.save(problems, tmp_path / "p.jsonl")
    assert data.restore(tmp_path / "p.jsonl") == problems
    (tmp_path / "p.jsonl").write_text("{")
    with pytest.raises(DataError, match="missing or damaged"):
        data.restore(tmp_path / "p.jsonl")


def test_unknown_task_is_refused_with_the_known() -> None:
    with pytest.raises(UsageError, match="unknown task 'gsm9k'; known: gsm8k"):
        tasks.get("gsm9k")
