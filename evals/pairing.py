"""Joins two arms item by item: right/wrong tables, statuses, lengths, flips and what could not be paired."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from evals.errors import ProtocolError
from evals.records import ArmResult, ItemResult, Status
from evals.statistics import Clustered, PairedCounts, clustered

Score = Literal["ours", "strict", "flexible"]
TRUNCATED: tuple[Status, ...] = ("truncated", "truncated_in_reasoning")


class PairingError(ProtocolError):
    """The arms cannot be joined: no common items, or repeats that do not match."""


@dataclass(frozen=True)
class Flip:
    """One item answered right by one arm only. `direction` is the candidate's: "worse" or "better"."""

    item: str
    repeat: int
    direction: Literal["worse", "better"]
    baseline: ItemResult
    candidate: ItemResult


@dataclass(frozen=True)
class ArmCounts:
    """Counts of one arm over its items and repeats; `right` counts answered items only."""

    n: int
    right: int
    completed: int
    right_completed: int
    truncated: int
    empty: int
    error: int
    mean_completion_tokens: float | None

    @property
    def answered(self) -> int:
        return self.n - self.error

    @property
    def accuracy(self) -> float:
        """Right among answered; errors are neither right nor wrong."""
        return self.right / self.answered if self.answered else 0.0


@dataclass(frozen=True)
class ErrorBounds:
    """What the items with errors could make of the comparison: all candidate errors wrong, or all right."""

    unresolved: int
    worst: PairedCounts
    best: PairedCounts


@dataclass(frozen=True, eq=False)
class PairedOutcomes:
    """Two arms on the same items, in protocol order; arrays are [items, repeats].

    `valid` marks pairs where both arms have an answer (anything but an error). `right_*` are False where
    there is none. `only_in_*` are item ids one arm lacks altogether.
    """

    baseline: tuple[ArmResult, ...]
    candidate: tuple[ArmResult, ...]
    score: Score
    items: tuple[str, ...]
    right_baseline: npt.NDArray[np.bool_]
    right_candidate: npt.NDArray[np.bool_]
    valid: npt.NDArray[np.bool_]
    only_in_baseline: tuple[str, ...]
    only_in_candidate: tuple[str, ...]
    prompt_mismatches: tuple[str, ...]

    @property
    def repeats(self) -> int:
        return len(self.baseline)

    @property
    def pairs(self) -> int:
        return int(self.valid.sum())

    @cached_property
    def counts(self) -> PairedCounts:
        """The 2×2 table over all valid pairs (items × repeats)."""
        x, y = self.right_baseline[self.valid], self.right_candidate[self.valid]
        return PairedCounts(a=int((x & y).sum()), b=int((x & ~y).sum()), c=int((~x & y).sum()), d=int((~x & ~y).sum()))

    @cached_property
    def clustered(self) -> Clustered:
        """The same with the item as cluster; equals `counts` for a single repeat."""
        return clustered(self.right_baseline, self.right_candidate, self.valid)

    def status(self, arm: Literal["baseline", "candidate"], statuses: Sequence[Status]) -> list[bool]:
        """Per (item, repeat), item-major: has the arm's answer one of these statuses?"""
        arms = self.baseline if arm == "baseline" else self.candidate
        return [run.items[item].status in statuses for item in self.items for run in arms]

    def arm_counts(self, arm: Literal["baseline", "candidate"]) -> ArmCounts:
        arms = self.baseline if arm == "baseline" else self.candidate
        results = [run.items[item] for item in self.items for run in arms]
        right = self.right_baseline if arm == "baseline" else self.right_candidate
        tokens = [r.completion_tokens for r in results if r.status != "error" and r.completion_tokens is not None]
        status = [r.status for r in results]
        flat = right.ravel()
        return ArmCounts(
            n=len(results),
            right=int(flat.sum()),
            completed=status.count("completed"),
            right_completed=sum(1 for ok, s in zip(flat, status, strict=True) if ok and s == "completed"),
            truncated=sum(s in TRUNCATED for s in status),
            empty=status.count("empty"),
            error=status.count("error"),
            mean_completion_tokens=sum(tokens) / len(tokens) if tokens else None,
        )

    @cached_property
    def lengths(self) -> tuple[list[float], list[float]]:
        """Completion tokens per item (mean over repeats) of both arms, items where both report them."""
        base: list[float] = []
        cand: list[float] = []
        for i, item in enumerate(self.items):
            pairs = [
                (x.completion_tokens, y.completion_tokens)
                for k, (x, y) in enumerate(self._row(item))
                if self.valid[i, k] and x.completion_tokens is not None and y.completion_tokens is not None
            ]
            if pairs:
                base.append(sum(p[0] for p in pairs) / len(pairs))
                cand.append(sum(p[1] for p in pairs) / len(pairs))
        return base, cand

    @cached_property
    def texts_differ(self) -> int:
        """Valid pairs whose completions are not the same string."""
        return sum(
            x.text != y.text
            for i, item in enumerate(self.items)
            for k, (x, y) in enumerate(self._row(item))
            if self.valid[i, k]
        )

    def flips(self) -> Iterator[Flip]:
        """Every pair that only one arm got right, worse ones first, in protocol order within each."""
        for direction, mask in (
            ("worse", self.right_baseline & ~self.right_candidate & self.valid),
            ("better", ~self.right_baseline & self.right_candidate & self.valid),
        ):
            for i, k in np.argwhere(mask):
                item = self.items[int(i)]
                yield Flip(
                    item,
                    int(k),
                    direction,  # type: ignore[arg-type]
                    self.baseline[int(k)].items[item],
                    self.candidate[int(k)].items[item],
                )

    def both_wrong(self) -> list[str]:
        """Items no pair of answers got right: hard, or wrongly labelled."""
        never = ~(self.right_baseline | self.right_candidate) | ~self.valid
        return [item for item, row, ok in zip(self.items, never, self.valid, strict=True) if row.all() and ok.any()]

    def error_bounds(self) -> ErrorBounds:
        """The table if every unresolved answer went against the candidate, and if every one went for it."""
        base_error = np.array(self.status("baseline", ("error",)), bool).reshape(self.valid.shape)
        cand_error = np.array(self.status("candidate", ("error",)), bool).reshape(self.valid.shape)
        return ErrorBounds(
            unresolved=int((~self.valid).sum()),
            worst=_table(self.right_baseline | base_error, self.right_candidate & ~cand_error),
            best=_table(self.right_baseline & ~base_error, self.right_candidate | cand_error),
        )

    def truncated_as_right(self) -> PairedCounts:
        """The table if every truncated candidate answer had come out right: what the budget could explain."""
        cut = np.array(self.status("candidate", TRUNCATED), bool).reshape(self.valid.shape)
        return _table(self.right_baseline[self.valid], (self.right_candidate | cut)[self.valid])

    def without(self, statuses: Sequence[Status]) -> PairedCounts:
        """The table over pairs where neither arm has one of these statuses (e.g. accuracy among
        non-empty)."""
        drop = np.array(self.status("baseline", statuses), bool) | np.array(self.status("candidate", statuses), bool)
        keep = self.valid & ~drop.reshape(self.valid.shape)
        return _table(self.right_baseline[keep], self.right_candidate[keep])

    def by_difficulty(self) -> dict[str, PairedCounts]:
        """The table per difficulty label, labels sorted; empty when the items carry none."""
        labels = [self.baseline[0].items[item].difficulty for item in self.items]
        out: dict[str, PairedCounts] = {}
        for label in sorted({x for x in labels if x is not None}, key=lambda x: (len(x), x)):
            rows = np.array([x == label for x in labels])
            keep = self.valid[rows]
            out[label] = _table(self.right_baseline[rows][keep], self.right_candidate[rows][keep])
        return out

    def _row(self, item: str) -> Iterator[tuple[ItemResult, ItemResult]]:
        return ((x.items[item], y.items[item]) for x, y in zip(self.baseline, self.candidate, strict=True))


def _table(x: npt.NDArray[np.bool_], y: npt.NDArray[np.bool_]) -> PairedCounts:
    return PairedCounts(int((x & y).sum()), int((x & ~y).sum()), int((~x & y).sum()), int((~x & ~y).sum()))


def pair(
    baseline: ArmResult | Sequence[ArmResult],
    candidate: ArmResult | Sequence[ArmResult],
    score: Score = "ours",
) -> PairedOutcomes:
    """Join two arms (or their repeats, in order) by item id, never by row number.

    The items are those present in every run, in the baseline's order; what one side lacks is listed, not
    silently dropped. Raises PairingError when nothing is common or the numbers of repeats differ.
    """
    base = (baseline,) if isinstance(baseline, ArmResult) else tuple(baseline)
    cand = (candidate,) if isinstance(candidate, ArmResult) else tuple(candidate)
    if not base or len(base) != len(cand):
        raise PairingError(
            f"baseline has {len(base)} and candidate {len(cand)} repeats; run both with the same --repeats"
        )
    in_base = set(base[0].items).union(*(run.items for run in base[1:]))
    in_cand = set(cand[0].items).union(*(run.items for run in cand[1:]))
    everywhere = set(base[0].items).intersection(*(run.items for run in base[1:] + cand))
    items = tuple(item for item in base[0].items if item in everywhere)
    if not items:
        raise PairingError(
            f"'{base[0].name}' ({len(in_base)} items) and '{cand[0].name}' ({len(in_cand)} items) "
            "have no item in common: were they run on the same data set?"
        )
    rows_base = [[run.items[item] for run in base] for item in items]
    rows_cand = [[run.items[item] for run in cand] for item in items]
    return PairedOutcomes(
        baseline=base,
        candidate=cand,
        score=score,
        items=items,
        right_baseline=_right(rows_base, score),
        right_candidate=_right(rows_cand, score),
        valid=np.array(
            [
                [x.status != "error" and y.status != "error" for x, y in zip(bs, cs, strict=True)]
                for bs, cs in zip(rows_base, rows_cand, strict=True)
            ],
            dtype=bool,
        ),
        only_in_baseline=tuple(sorted(in_base - set(items))),
        only_in_candidate=tuple(sorted(in_cand - set(items))),
        prompt_mismatches=tuple(
            item
            for item, bs, cs in zip(items, rows_base, rows_cand, strict=True)
            if len({x.prompt_sha256 for x in bs + cs}) > 1
        ),
    )


def _right(rows: list[list[ItemResult]], score: Score) -> npt.NDArray[np.bool_]:
    return np.array([[bool(getattr(x, score)) and x.status != "error" for x in row] for row in rows], dtype=bool)
