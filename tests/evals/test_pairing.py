"""Pairing by item id: tables, statuses, bounds, flips, repeats, and what could not be paired."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evals.pairing import PairingError, pair
from evals.records import ArmResult
from evals.statistics import PairedCounts
from tests.evals.arms import arm, arms, item


def test_table_and_flips() -> None:
    outcomes = pair(*arms(20, 3, 2, 5))
    assert outcomes.counts == PairedCounts(20, 3, 2, 5)
    flips = list(outcomes.flips())
    assert [f.direction for f in flips] == ["worse"] * 3 + ["better"] * 2
    assert all(f.baseline.ours and not f.candidate.ours for f in flips[:3])
    assert len(outcomes.both_wrong()) == 5 and outcomes.texts_differ == 5
    assert outcomes.arm_counts("baseline").accuracy == 23 / 30


def test_order_of_rows_does_not_matter() -> None:
    """Joined by question hash: a candidate that answers in another order pairs the same."""
    base, cand = arms(20, 3, 2, 5)
    shuffled = replace(cand, items=dict(reversed(list(cand.items.items()))))
    assert pair(base, shuffled).counts == pair(base, cand).counts
    assert pair(base, shuffled).items == tuple(base.items)


def test_score_is_chosen() -> None:
    base, cand = arms(4, 1, 0, 1)
    worse = replace(cand, items={k: replace(v, strict=False) for k, v in cand.items.items()})
    assert pair(base, worse, score="strict").counts == PairedCounts(0, 5, 0, 1)
    assert pair(base, worse, score="flexible").counts == PairedCounts(4, 1, 0, 1)


def test_errors_are_neither_right_nor_wrong() -> None:
    base, cand = arms(10, 2, 1, 3, base={"statuses": {0: "error"}}, cand={"statuses": {1: "error", 2: "error"}})
    outcomes = pair(base, cand)
    assert outcomes.pairs == 13 and outcomes.counts == PairedCounts(7, 2, 1, 3)
    counts = outcomes.arm_counts("candidate")
    assert (counts.error, counts.answered, counts.right) == (2, 14, 9)
    bounds = outcomes.error_bounds()
    assert bounds.unresolved == 3
    # worst: the baseline's error was right (the candidate too: it answered right), the candidate's two wrong
    assert bounds.worst == PairedCounts(8, 4, 1, 3)
    assert bounds.best == PairedCounts(9, 2, 2, 3)


def test_statuses_and_subsets() -> None:
    base, cand = arms(10, 4, 0, 2, cand={"statuses": {10: "empty", 11: "truncated", 12: "truncated_in_reasoning"}})
    outcomes = pair(base, cand)
    counts = outcomes.arm_counts("candidate")
    assert (counts.empty, counts.truncated, counts.completed, counts.right_completed) == (1, 2, 13, 10)
    assert outcomes.without(("empty",)) == PairedCounts(10, 3, 0, 2)
    assert outcomes.truncated_as_right() == PairedCounts(12, 2, 0, 2)


def test_missing_items_and_other_prompts_are_listed() -> None:
    base, cand = arms(6, 0, 0, 0)
    items = dict(cand.items)
    gone = next(iter(items))
    del items[gone]
    extra = item(99, True)
    items[extra.item] = extra
    changed = next(iter(items))
    items[changed] = replace(items[changed], prompt_sha256="0" * 64)
    outcomes = pair(base, replace(cand, items=items))
    assert outcomes.only_in_baseline == (gone,) and outcomes.only_in_candidate == (extra.item,)
    assert outcomes.prompt_mismatches == (changed,) and len(outcomes.items) == 5


def test_nothing_in_common_and_uneven_repeats() -> None:
    base, cand = arms(3, 0, 0, 0)
    other = ArmResult("candidate", "x", None, None, {"f" * 16: item(77, True)})
    with pytest.raises(PairingError, match="no item in common"):
        pair(base, other)
    with pytest.raises(PairingError, match="--repeats"):
        pair([base, base], [cand])


def test_repeats_are_clustered() -> None:
    base, cand = arms(90, 6, 2, 2)
    outcomes = pair([base, base, base], [cand, cand, cand])
    assert outcomes.repeats == 3 and outcomes.counts == PairedCounts(270, 18, 6, 6)
    assert outcomes.clustered.deff == pytest.approx(3)
    assert outcomes.clustered.effective == pytest.approx((6, 2, 100))
    assert len(list(outcomes.flips())) == 24
    assert {f.repeat for f in outcomes.flips()} == {0, 1, 2}


def test_lengths_average_over_repeats() -> None:
    a = arm("baseline", [True, True], tokens=[100, 50])
    b = arm("baseline", [True, True], tokens=[200, 50], repeat=1)
    c = arm("candidate", [True, True], tokens=[80, None])
    d = arm("candidate", [True, True], tokens=[120, None], repeat=1)
    assert pair([a, b], [c, d]).lengths == ([150.0], [100.0])


def test_by_difficulty() -> None:
    base, cand = arms(4, 1, 1, 0)

    def label(run: ArmResult) -> ArmResult:
        items = {k: replace(v, difficulty=str(2 + 8 * (v.doc_id % 2))) for k, v in run.items.items()}
        return replace(run, items=items)

    tables = pair(label(base), label(cand)).by_difficulty()
    assert list(tables) == ["2", "10"]
    assert sum(t.n for t in tables.values()) == 6
    assert tables["2"] == PairedCounts(2, 1, 0, 0) and tables["10"] == PairedCounts(2, 0, 1, 0)
    assert pair(base, cand).by_difficulty() == {}


def test_arrays_have_items_by_repeats() -> None:
    outcomes = pair(*arms(3, 1, 0, 0))
    assert outcomes.right_baseline.shape == (4, 1) and outcomes.valid.dtype == np.bool_
