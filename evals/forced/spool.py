"""Keeps one server's scores on disk, text by text, so that servers may run one after the other."""

from __future__ import annotations

import io
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from evals.forced.records import RoutingTrace, Scores


class Spool:
    """A file of compressed records with an index in memory (a few bytes a text); a context manager.

    Logprobs are kept in FP32, the precision servers compute them in; ids as int32, routing as int16.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: IO[bytes] = path.open("w+b")
        self._index: dict[str, tuple[int, int]] = {}
        self.lengths: dict[str, int] = {}  # tokens of each text

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close and delete the file: its figures are in the summary, and it is large."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __contains__(self, item: str) -> bool:
        return item in self._index

    def add(self, scores: Scores) -> None:
        """Write one text; a second record of a text replaces the first."""
        arrays = {
            "ids": scores.ids.astype(np.int32), "logprobs": scores.logprobs.astype(np.float32),
            "top_ids": scores.top_ids.astype(np.int32), "top_logprobs": scores.top_logprobs.astype(np.float32),
            "tokens": np.array(scores.tokens, dtype=np.str_), "scored_from": np.array(scores.scored_from),
        }
        if scores.routing is not None:
            arrays["experts"] = scores.routing.ids.astype(np.int16)
            arrays["layers"] = np.array(scores.routing.layers)
            if scores.routing.gaps is not None:
                arrays["gaps"] = scores.routing.gaps.astype(np.float16)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        start = self._file.seek(0, io.SEEK_END)
        self._index[scores.item] = start, self._file.write(buffer.getbuffer())
        self.lengths[scores.item] = len(scores.ids)

    def get(self, item: str) -> Scores:
        """Read one text back."""
        start, size = self._index[item]
        self._file.seek(start)
        with np.load(io.BytesIO(self._file.read(size))) as z:
            routing = None
            if "experts" in z:
                gaps = z["gaps"].astype(np.float64) if "gaps" in z else None
                routing = RoutingTrace(z["experts"].astype(np.int64), tuple(int(x) for x in z["layers"]), gaps)
            return Scores(
                item, z["ids"].astype(np.int64), z["logprobs"].astype(np.float64), z["top_ids"].astype(np.int64),
                z["top_logprobs"].astype(np.float64), tuple(str(t) for t in z["tokens"]), int(z["scored_from"]),
                routing,
            )
