"""Problems and shots: local JSONL or the hub, ids by question, a seeded order, shots from train only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.errors import DataError, UsageError
from evals.records import canonical, item_id, sha256_hex

# sha256 of the published files (openai/grade-school-math at 3101c7d5)
OFFICIAL = {
    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14": "GSM8K test (official file)",
    "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465": "GSM8K train (official file)",
}
_GOLD = re.compile(r"####\s*-?[0-9.,]+")


@dataclass(frozen=True)
class RawData:
    """What a task's loader returns: rows with at least `question` and `answer` (ending in `#### N`).

    `sha256` identifies the test rows (of the file's bytes when it is a file), `label` says in words what they
    are. `train` is empty when only a test file was given.
    """

    train: Sequence[Mapping[str, Any]]
    test: Sequence[Mapping[str, Any]]
    sha256: str
    label: str


@dataclass(frozen=True)
class Item:
    """One problem: `id` from its question, `doc_id` its row in the dataset."""

    id: str
    doc_id: int
    question: str
    answer: str
    difficulty: str | None = None


@dataclass(frozen=True)
class Problems:
    """The items of a run in the order asked, and its shots."""

    items: tuple[Item, ...]
    shots: tuple[Mapping[str, str], ...]
    sha256: str
    label: str
    total: int

    @property
    def shots_sha256(self) -> str:
        """Hash of the shots' text, in order."""
        return sha256_hex(canonical([dict(s) for s in self.shots]))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; a bad line is an error naming it."""
    try:
        if not path.is_file():
            raise DataError(f"no file {path}: --data takes a folder (test.jsonl, train.jsonl) or a file")
        file = path.open(encoding="utf-8")
    except PermissionError:
        raise DataError(f"{path} may not be read by this user; change its permissions or its folder's") from None
    rows = []
    with file as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number} is not JSON ({error.msg}); a line is one object") from None
            fields = ("question", "answer")
            if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in fields):
                raise DataError(f"{path}:{number} needs the text fields 'question' and 'answer'")
            rows.append(row)
    if not rows:
        raise DataError(f"{path} holds no problems")
    return rows


def load_gsm8k(data: Path | None, train: Path | None) -> RawData:
    """GSM8K or anything in its format, from `data` (folder or file) or from the hub when `data` is None."""
    if data is None:
        return _from_hub(train)
    test_file = data / "test.jsonl" if data.is_dir() else data
    test = read_jsonl(test_file)
    digest = sha256_hex(test_file.read_bytes())
    train_file = train or (data / "train.jsonl" if data.is_dir() else None)
    if train_file is not None and train_file.resolve() == test_file.resolve():
        raise DataError(f"{train_file} is the evaluated file; shots must come from other problems")
    rows = read_jsonl(train_file) if train_file is not None and (train or train_file.exists()) else []
    label = OFFICIAL.get(digest, f"{test_file.name} (not the official GSM8K file)")
    return RawData(rows, test, digest, label)


def _from_hub(train: Path | None) -> RawData:
    try:
        import datasets

        loaded = datasets.load_dataset("openai/gsm8k", "main")
    except Exception as error:  # the hub raises many types; all mean the same to the user
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise DataError(
            f"cannot load openai/gsm8k from the hub ({reason}); "
            "offline, give --data DIR with train.jsonl and test.jsonl"
        ) from None
    test = [{"question": r["question"], "answer": r["answer"]} for r in loaded["test"]]
    # The published file is these rows dumped in this form, so both roads give the same digest.
    digest = sha256_hex("".join(json.dumps(r) + "\n" for r in test))
    shots = read_jsonl(train) if train else [dict(r) for r in loaded["train"]]
    return RawData(shots, test, digest, OFFICIAL.get(digest, "openai/gsm8k from the hub"))


def order(ids: Sequence[str], seed: int) -> list[int]:
    """A permutation that depends on the seed and the ids only: rows sorted by sha256(seed:id)."""
    return sorted(range(len(ids)), key=lambda i: sha256_hex(f"{seed}:{ids[i]}"))


def select(raw: RawData, *, shots: int, limit: int | None, seed: int) -> Problems:
    """The first `limit` items of the seeded order and the first `shots` training rows.

    Raises `UsageError` for an impossible limit or number of shots and `DataError` for a row without gold
    answer, a duplicate question, or a shot that is also evaluated.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}; leave it out for all {len(raw.test)}")
    if shots < 0:
        raise UsageError(f"--shots must be 0 or more, got {shots}")
    if shots > len(raw.train):
        raise UsageError(
            f"--shots {shots} needs {shots} training rows, found {len(raw.train)}; "
            "add train.jsonl beside test.jsonl, give --train FILE, or use --shots 0"
        )
    ids = [item_id(row["question"]) for row in raw.test]
    seen: dict[str, int] = {}
    for row_number, (name, row) in enumerate(zip(ids, raw.test, strict=True)):
        if name in seen:
            raise DataError(f"rows {seen[name] + 1} and {row_number + 1} ask the same question; remove one")
        seen[name] = row_number
        if not _GOLD.search(row["answer"]):
            raise DataError(f"row {row_number + 1} has no gold answer: 'answer' must end with '#### NUMBER'")
    examples = tuple({"question": r["question"], "answer": r["answer"]} for r in raw.train[:shots])
    for number, example in enumerate(examples, 1):
        if item_id(example["question"]) in seen:
            raise DataError(f"shot {number} is also an evaluated problem; shots must come from train only")
    chosen = order(ids, seed)[:limit]
    items = tuple(
        Item(ids[i], i, raw.test[i]["question"], raw.test[i]["answer"], raw.test[i].get("difficulty"))
        for i in chosen
    )
    return Problems(items, examples, raw.sha256, raw.label, len(raw.test))


def save(problems: Problems, path: Path) -> None:
    """Keep what was asked in the run folder, so that a report needs no other file."""
    head = {"sha256": problems.sha256, "label": problems.label, "total": problems.total,
            "shots": [dict(s) for s in problems.shots]}
    lines = [head, *({k: v for k, v in vars(item).items() if v is not None} for item in problems.items)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def restore(path: Path) -> Problems:
    """Inverse of `save`."""
    try:
        head, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        items = tuple(Item(**row) for row in rows)
        return Problems(items, tuple(head["shots"]), head["sha256"], head["label"], head["total"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is missing or damaged ({error}); a run folder must hold it") from None
