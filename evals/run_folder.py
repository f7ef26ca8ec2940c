"""A run folder: run.json (who, what, with which servers), the journal, the problems, logs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evals.errors import JournalError, UsageError
from evals.records import Protocol, RunMeta

SCHEMA = 1


class RunFolder:
    """Paths and `run.json` of one run. Every change of `run.json` replaces the file whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {}

    @property
    def journal(self) -> Path:
        return self.path / "items.jsonl"

    @property
    def problems(self) -> Path:
        return self.path / "dataset.jsonl"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    def log(self, arm: str) -> Path:
        """Server log of an arm."""
        return self.path / "logs" / f"{arm.replace(':', '-')}.log"

    @classmethod
    def create(cls, path: Path, meta: RunMeta, protocol: Protocol, sampling: Mapping[str, Any]) -> RunFolder:
        """A new run; a folder that already holds one is refused."""
        folder = cls(path)
        if folder.run_json.exists() or folder.journal.exists():
            raise UsageError(f"{path} already holds a run; add --resume to go on with it, or choose another --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to {path}: {error.strerror}; choose another --out") from None
        folder.data = {
            "schema": SCHEMA,
            "meta": json.loads(json.dumps(asdict(meta))),
            "protocol": protocol.as_dict(),
            "protocol_sha256": protocol.hash(),
            "sampling": dict(sampling),
            "arms": {},
        }
        folder.save()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        folder = cls(path)
        try:
            folder.data = json.loads(folder.run_json.read_text(encoding="utf-8"))
        except OSError:
            raise UsageError(f"{path} is not a run folder (no run.json in it)") from None
        except ValueError as error:
            raise JournalError(f"{folder.run_json} is damaged ({error}); start a new run") from None
        if folder.data.get("schema") != SCHEMA:
            raise UsageError(
                f"{folder.run_json} has schema {folder.data.get('schema')}, this version reads {SCHEMA}; "
                "use the version that wrote it"
            )
        return folder

    def save(self) -> None:
        """Write `run.json` atomically and durably."""
        temporary = self.path / "run.json.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(self.data, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.run_json)

    def protocol(self) -> Protocol:
        """The run's protocol."""
        return Protocol.from_dict(self.data["protocol"])

    def meta(self) -> RunMeta:
        """The run's meta record."""
        fields = dict(self.data["meta"])
        fields["factors"] = tuple(fields.get("factors", ()))
        return RunMeta(**fields)

    def arm(self, name: str) -> dict[str, Any]:
        """The mutable entry of an arm: variant, url, fingerprints, limits."""
        entry: dict[str, Any] = self.data["arms"].setdefault(name, {})
        return entry
