"""Append-only journal of answers: one JSON line per finished item, on disk before it counts as finished."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from evals.errors import JournalError
from evals.records import canonical, sha256_hex

SCHEMA = 1  # enters every key: a change of the row format or of the client's behaviour makes old rows strangers
FINAL = frozenset({"completed", "truncated", "empty", "truncated_in_reasoning"})
Slot = tuple[str, int, str]  # arm, repeat, item


def item_key(prompt: str, body: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """What an answer depends on: prompt bytes, every other field of the request, and who answers.

    `body` is the request without its prompt; `identity` comes from `integrity.identity` (variant asked for
    and resolved, weights, versions, or a foreign server's address and model).
    """
    sampling = {k: v for k, v in body.items() if k not in ("prompt", "messages")}
    return sha256_hex(canonical(
        {"schema": SCHEMA, "prompt": sha256_hex(prompt), "sampling": sampling, "server": dict(identity)}
    ))


class Journal:
    """The journal of one run folder, held under a lock; use as a context manager.

    A torn last line (power cut, `kill -9` in the middle of a write) is cut off when the file is opened; any
    other unreadable line is an error. Rows with status "error" are kept for the record, but a later row of the
    same slot replaces them. Two different final rows of one slot are refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(f"{path}.lock")
        self._rows: dict[Slot, dict[str, Any]] = {}
        self._fd = -1

    def __enter__(self) -> Journal:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise JournalError(
                f"{self.path} is in use by another `evals` process; wait for it or choose another --out"
            ) from None
        try:
            self._load()
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            _sync_folder(self.path.parent)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.release()

    def _load(self) -> None:
        if not self.path.exists():
            return
        good = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                whole = line.endswith(b"\n")
                try:
                    row = json.loads(line)
                    slot = (row["arm"], row["repeat"], row["item"])
                    row["key"], row["status"]
                except (ValueError, KeyError, TypeError):
                    if not whole:
                        break
                    raise JournalError(
                        f"{self.path}:{number} is damaged; only a torn last line is repaired. "
                        "Restore the file or start a new run"
                    ) from None
                if not whole:  # a whole row without its newline: the write was cut just there
                    break
                self._remember(slot, row, number)
                good += len(line)
        if good < self.path.stat().st_size:
            with self.path.open("r+b") as file:
                file.truncate(good)
                file.flush()
                os.fsync(file.fileno())

    def _remember(self, slot: Slot, row: dict[str, Any], number: int) -> None:
        old = self._rows.get(slot)
        if old is not None and old["status"] in FINAL:
            raise JournalError(
                f"{self.path}:{number} answers item {slot[2]} of arm '{slot[0]}' a second time; "
                "the file was edited or two processes wrote it: start a new run"
            )
        self._rows[slot] = row

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write finished items and return when they are on the disk (one fsync for the lot)."""
        if not rows:
            return
        number = len(self._rows) + 1
        for row in rows:
            self._remember((row["arm"], row["repeat"], row["item"]), dict(row), number)
        data = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view):]
        os.fsync(self._fd)

    def get(self, arm: str, repeat: int, item: str, key: str) -> dict[str, Any] | None:
        """The final row of a slot, or None when it has none yet.

        Raises `JournalError` when the slot holds a final answer under another key: it was given by another
        variant, other weights, other versions, or to another prompt.
        """
        row = self._rows.get((arm, repeat, item))
        if row is None or row["status"] not in FINAL:
            return None
        if row["key"] != key:
            raise JournalError(
                f"{self.path} holds answers for arm '{arm}' that another variant, weights, version or prompt gave "
                f"(item {item}: key {row['key'][:12]} instead of {key[:12]}); start a new run with another --out"
            )
        return row

    def last(self, arm: str, repeat: int, item: str) -> dict[str, Any] | None:
        """The latest row of a slot, whatever its status."""
        return self._rows.get((arm, repeat, item))

    def missing(self, arm: str, repeat: int, items: Iterable[tuple[str, str]]) -> list[str]:
        """Item ids, of (id, key) pairs in order, that have no final row yet."""
        return [item for item, key in items if self.get(arm, repeat, item, key) is None]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)


def read(path: Path) -> list[dict[str, Any]]:
    """Latest row of every slot, for reports: takes no lock and writes nothing."""
    journal = Journal(path)
    if not path.exists():
        raise JournalError(f"no journal at {path}; is this a run folder?")
    text = path.read_bytes()
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            journal._remember((row["arm"], row["repeat"], row["item"]), row, number)
        except (ValueError, KeyError, TypeError):
            raise JournalError(f"{path}:{number} is damaged; restore the file or run again") from None
    return list(journal)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
