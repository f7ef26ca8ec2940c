"""Teacher-forced comparison: KL bounds, routing agreement, reading replies, spool, limits, figures."""

from __future__ import annotations

import base64
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.errors import JournalError, ServerError
from evals.forced.collect import compare
from evals.forced.divergence import Divergence, mean_by_cluster, token_kl, top1
from evals.forced.drift import drift_evidence, first_difference, in_loop
from evals.forced.figures import heat_map
from evals.forced.limits import Limits, gross, logprob_evidence, routing_evidence
from evals.forced.records import MISSING, RoutingTrace, Scores, parse_scores
from evals.forced.routing import NEAR_TIE, Agreement
from evals.forced.spool import Spool
from evals.forced.texts import RESERVE, Text, long_texts
from evals.layers import explained, load, save
from evals.pairing import pair
from evals.rules import LayerEvidence
from tests.evals.arms import arm, item


def scores(
    logits: np.ndarray, ids: list[int], k: int, name: str = "x", routing: RoutingTrace | None = None, start: int = 1
) -> Scores:
    """What a server with these logits [T - 1, V] says about tokens `ids` [T], listing its top k."""
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    t = len(ids)
    top_ids = np.full((t, k + 1), MISSING, dtype=np.int64)
    top = np.full((t, k + 1), -np.inf)
    own = np.full(t, np.nan)
    for row in range(1, t):
        best = list(np.argsort(-logp[row - 1], kind="stable")[:k])
        names = best if ids[row] in best else [*best, ids[row]]
        top_ids[row, : len(names)] = names
        top[row, : len(names)] = logp[row - 1][names]
        own[row] = logp[row - 1][ids[row]]
    return Scores(name, np.array(ids), own, top_ids, top, tuple(f"t{i} " for i in ids), start, routing)


def exact_kl(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    p, q = np.exp(x), np.exp(y)
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.floats(0.0, 3.0))
@settings(max_examples=60, deadline=None)
def test_kl_from_top_k_never_overstates_and_is_exact_with_every_token(seed: int, k: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(5, 12)) * 2
    y = x + rng.normal(size=(5, 12)) * spread
    ids = [0, *rng.integers(0, 12, 5).tolist()]
    truth = exact_kl(x, y)
    got = token_kl(scores(x, ids, k), scores(y, ids, k))
    assert (got <= truth + 1e-9).all() and (got >= 0).all()
    everything = token_kl(scores(x, ids, 12), scores(y, ids, 12))
    np.testing.assert_allclose(everything, truth, atol=1e-9)


def test_equal_servers_have_no_divergence() -> None:
    x = np.random.default_rng(0).normal(size=(30, 50))
    ids = [1, *range(30)]
    total = Divergence()
    total.add(scores(x, ids, 20), scores(x, ids, 20))
    s = total.summary()
    assert (s.mean_kl, s.max_kl, s.top1_agreement, s.delta_nll, s.perplexity_ratio) == (0, 0, 1, 0, 1)
    assert (s.texts, s.tokens) == (1, 30)


def test_equal_logprobs_are_no_changed_top_token() -> None:
    a = Scores("x", np.array([1, 5]), np.array([np.nan, -1.0]), np.array([[-1, -1], [5, 9]]),
               np.array([[-np.inf] * 2, [-1.0, -1.0]]), ("a", "b"))
    b = Scores("x", np.array([1, 5]), np.array([np.nan, -1.0]), np.array([[-1, -1], [9, 5]]),
               np.array([[-np.inf] * 2, [-1.0, -1.0]]), ("a", "b"))
    assert top1(a).tolist() == top1(b).tolist() == [5]


def test_only_the_solution_counts_and_the_worst_token_is_shown_in_context() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 30))
    y = x.copy()
    y[2] += rng.normal(size=30) * 5  # in the prompt: token 3
    y[14, 7] += 4  # in the solution: token 15
    ids = [0, *rng.integers(0, 30, 20).tolist()]
    total = Divergence()
    total.add(scores(x, ids, 30, start=10), scores(y, ids, 30, start=10))
    s = total.summary()
    assert s.tokens == 11
    assert s.mean_kl == pytest.approx(exact_kl(x[14:15], y[14:15])[0] / 11)
    assert s.worst[0].position == 15 and s.worst[0].context.endswith(f"t{ids[14]} ")
    assert s.worst[0].token == f"t{ids[15]} "


def test_other_tokens_are_refused() -> None:
    x = np.zeros((2, 4))
    with pytest.raises(ServerError, match="tokenise the same text differently"):
        Divergence().add(scores(x, [0, 1, 2], 3), scores(x, [0, 1, 3], 3))


def test_interval_by_text_is_that_of_a_ratio_estimator() -> None:
    rng = np.random.default_rng(3)
    parts = [(float(rng.normal(0.1, 1) * n), int(n)) for n in rng.integers(5, 50, 400)]
    mean, low, high = mean_by_cluster(parts)
    sums, sizes = np.array(parts).T
    draws = rng.integers(0, 400, (4000, 400))
    resampled = sums[draws].sum(1) / sizes[draws].sum(1)
    assert mean == pytest.approx(sums.sum() / sizes.sum())
    assert (high - low) / 2 == pytest.approx(1.96 * resampled.std(), rel=0.08)
    assert mean_by_cluster([(3.0, 2)])[1:] == (-math.inf, math.inf)


# ---- replies ------------------------------------------------------------------------------------------------------


def reply(n: int = 4, **change: Any) -> dict[str, Any]:
    block: dict[str, Any] = {
        "tokens": [f"token_id:{i}" for i in range(n + 1)],
        "token_logprobs": [None, *[-0.5] * n],
        "top_logprobs": [None, *[{f"token_id:{i}": -0.5, "token_id:99": -2.0} for i in range(1, n + 1)]],
        "text_offset": list(range(0, 2 * (n + 1), 2)),
    }
    return {"logprobs": block | change}


def test_reads_tokens_pieces_and_where_the_solution_starts() -> None:
    s = parse_scores("x", reply(), 4, "aabbccdd", 4)
    assert s.ids.tolist() == [0, 1, 2, 3] and s.tokens == ("aa", "bb", "cc", "dd")
    assert s.scored_from == 2
    assert s.top_ids[1].tolist() == [1, 99] and s.top_logprobs[1].tolist() == [-0.5, -2.0]
    assert np.isnan(s.logprobs[0])


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_null_and_nan_name_item_and_token(bad: float | None) -> None:
    values = [None, -0.5, bad, -0.5, -0.5]
    with pytest.raises(ServerError, match=r"item x: a logprob of token 2 \('cc' after 'aabb'\) is null or NaN"):
        parse_scores("x", reply(token_logprobs=values), 4, "aabbccdd", 0)


def test_nan_among_the_alternatives_is_found_too() -> None:
    tops = [None, *[{"token_id:1": -0.5, "token_id:7": None if i == 2 else -1.0} for i in range(4)]]
    with pytest.raises(ServerError, match="token 3"):
        parse_scores("x", reply(top_logprobs=tops), 4, "aabbccdd", 0)


def test_offsets_that_cannot_be_true_are_not_used() -> None:
    s = parse_scores("x", reply(text_offset=[0, 10, 20, 30, 40]), 4, "aabbccdd", 4)  # as vLLM counts `token_id:N`
    assert s.tokens == (" 0", " 1", " 2", " 3") and s.scored_from == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": ["a", "b", "c", "d", "e"]}, "return_tokens_as_token_ids"),
        ({"tokens": ["token_id:1"], "token_logprobs": [-1.0], "top_logprobs": [{}]}, "does not echo"),
        ({"tokens": None}, "must support `echo`"),
    ],
)
def test_servers_without_the_feature_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerError, match=said):
        parse_scores("x", reply(**change), 4, "aabbccdd", 0)


def test_routing_is_decoded_with_its_gaps() -> None:
    ids = np.arange(5 * 2 * 3, dtype="<i2").reshape(5, 2, 3)
    gaps = np.full((5, 2), 0.25, dtype="<f2")
    field = {"dtype": "int16", "shape": [5, 2, 3], "layers": [1, 2], "data": base64.b64encode(ids.tobytes()).decode(),
             "gaps": base64.b64encode(gaps.tobytes()).decode()}
    s = parse_scores("x", reply() | {"routing": field}, 4, "aabbccdd", 0)
    assert s.routing is not None and s.routing.layers == (1, 2)
    assert s.routing.ids.tolist() == ids[:4].tolist() and s.routing.gaps is not None and s.routing.gaps.max() == 0.25


# ---- routing ------------------------------------------------------------------------------------------------------


def routed(ids: Any, gaps: Any = None) -> Scores:
    ids = np.array(ids)
    trace = RoutingTrace(ids, tuple(range(1, ids.shape[1] + 1)), None if gaps is None else np.array(gaps, float))
    n = ids.shape[0]
    return Scores("x", np.arange(n), np.zeros(n), np.zeros((n, 1), int), np.zeros((n, 1)), ("",) * n, 1, trace)


def test_flips_are_split_at_the_near_tie() -> None:
    near, far = NEAR_TIE / 2, NEAR_TIE * 2
    a = routed([[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]], [[far], [near], [far], [near]])
    b = routed([[[1, 0]], [[2, 9]], [[4, 9]], [[6, 7]]])
    total = Agreement()
    total.add(a, b)
    (layer,) = total.by_layer()
    assert (layer.exact, layer.near_tie_flips, layer.beyond_ties) == (0.5, 0.25, 0.25)
    assert layer.overlap == pytest.approx((1 + 0.5 + 0.5 + 1) / 4)
    assert layer.load_shift == pytest.approx(2 / 8)  # two of eight choices went to expert 9 instead
    assert total.gaps_known


def test_positions_and_several_texts_add_up() -> None:
    ids = np.tile(np.arange(4), (20, 1, 1))
    other = ids.copy()
    other[18:] += 10
    total = Agreement()
    total.add(routed(ids), routed(other))
    total.add(routed(ids), routed(ids))
    (layer,) = total.by_layer()
    assert layer.tokens == 40 and layer.exact == pytest.approx(38 / 40)
    assert layer.by_position == (1.0,) * 9 + (0.5,)
    assert not total.gaps_known and layer.beyond_ties == pytest.approx(2 / 40)


def test_routing_needs_both_servers_and_equal_layers() -> None:
    x = routed([[[0, 1]]])
    with pytest.raises(ServerError, match="return_routing"):
        Agreement().add(x, Scores("x", x.ids, x.logprobs, x.top_ids, x.top_logprobs, x.tokens))
    with pytest.raises(ServerError, match="different layers"):
        Agreement().add(x, routed([[[0, 1], [2, 3]]]))


# ---- spool and texts ----------------------------------------------------------------------------------------------


def test_spool_gives_back_what_it_took_and_removes_its_file(tmp_path: Path) -> None:
    x = np.random.default_rng(5).normal(size=(9, 40)).astype(np.float32).astype(np.float64)
    trace = RoutingTrace(np.arange(10 * 2 * 3).reshape(10, 2, 3), (1, 4), np.full((10, 2), 0.5))
    one = scores(x, list(range(10)), 20, "one", trace, start=4)
    with Spool(tmp_path / "a.spool") as spool:
        spool.add(one)
        spool.add(scores(x[:3], [1, 2, 3, 4], 2, "two"))
        back = spool.get("one")
        assert "one" in spool and "three" not in spool and spool.lengths == {"one": 10, "two": 4}
        for name in ("ids", "top_ids"):
            assert np.array_equal(getattr(back, name), getattr(one, name))
        np.testing.assert_allclose(back.logprobs[1:], one.logprobs[1:], rtol=1e-6)
        assert back.tokens == one.tokens and back.scored_from == 4
        assert back.routing is not None and np.array_equal(back.routing.ids, trace.ids)
        assert back.routing.layers == (1, 4) and spool.get("two").routing is None
        again = compare([Text("one", "", 0), Text("two", "", 0, "long")], spool, spool)
        assert again.gold.summary().tokens == 6 and again.long.summary().tokens == 3  # tokens 4..9; 1..3
        assert again.gold.summary().mean_kl == 0 and again.routed
    assert not (tmp_path / "a.spool").exists()


def test_long_texts_fill_the_limit_and_never_pass_it() -> None:
    texts = [Text(f"i{n}", "x" * n, 0) for n in range(1, 40)]
    tokens = {t.item: len(t.text) for t in texts}
    made = long_texts(texts, tokens, 200, 3)
    assert [t.item for t in made] == ["long-1", "long-2", "long-3"] and all(t.kind == "long" for t in made)
    for text in made:
        parts = text.text.split("\n\n")
        assert sum(len(p) + 2 for p in parts) <= 200 - RESERVE
        assert sum(len(p) + 2 for p in parts) > 200 - RESERVE - 42
    assert long_texts(texts, tokens, 20, 3) != [] and long_texts(texts, {}, 200, 3) == []


# ---- limits -------------------------------------------------------------------------------------------------------


def agreement(beyond: int, near: int = 0, tokens: int = 1000) -> list[Any]:
    ids = np.tile(np.arange(4), (tokens, 1, 1))
    other, gaps = ids.copy(), np.full((tokens, 1), 1.0)
    other[: beyond + near, 0, 0] = 9
    gaps[beyond : beyond + near] = 0.0
    total = Agreement()
    total.add(routed(ids, gaps), routed(other))
    return total.by_layer()


@pytest.mark.parametrize(("beyond", "near", "moved"), [(0, 0, False), (0, 300, False), (20, 0, False), (21, 0, True)])
def test_routing_moves_by_flips_beyond_near_ties_only(beyond: int, near: int, moved: bool) -> None:
    assert routing_evidence(agreement(beyond, near), None, Limits()).moved is moved


def test_a_noisy_baseline_raises_the_routing_limit() -> None:
    assert routing_evidence(agreement(40), agreement(10), Limits()).moved is False
    assert routing_evidence(agreement(60), agreement(10), Limits()).moved is True


def test_without_gaps_near_ties_are_allowed_for() -> None:
    assert routing_evidence(agreement(150), None, Limits(), gaps_known=False).moved is False
    assert routing_evidence(agreement(250), None, Limits(), gaps_known=False).moved is True


def divergence(shift: float, tokens: int = 400) -> Any:
    x = np.random.default_rng(2).normal(size=(tokens, 8))
    y = x.copy()
    y[:, 0] += shift
    total = Divergence()
    total.add(scores(x, [0, *[1] * tokens], 8), scores(y, [0, *[1] * tokens], 8))
    return total.summary()


def test_logprobs_move_by_kl_and_stricter_with_equal_weights() -> None:
    small = divergence(0.6)
    assert 5e-3 < small.mean_kl < 0.02
    assert logprob_evidence({"gold": small}, None, True, Limits()).moved
    other = logprob_evidence({"gold": small}, None, False, Limits(top1=0.9))
    assert not other.moved and other.metrics["gold_mean_kl"] == small.mean_kl
    floor = {"gold": small}
    assert not logprob_evidence({"gold": small}, floor, True, Limits(top1=0.9)).moved


def test_gross_only_when_shown_to_be_worse() -> None:
    worse, one_text = divergence(6.0), {"gold": divergence(6.0)}
    assert gross(one_text, Limits()) is None  # one text gives no interval
    total = Divergence()
    for n in range(6):
        x = np.random.default_rng(n).normal(size=(50, 8))
        y = x.copy()
        y[:, 1] -= 4.0
        total.add(scores(x, [0, *[1] * 50], 8), scores(y, [0, *[1] * 50], 8))
    assert "broken" in (gross({"gold": total.summary()}, Limits()) or "")
    assert worse.tokens == 400 and gross({}, Limits()) is None


def test_heat_map_is_a_picture_without_scripts() -> None:
    layers = agreement(300)
    tree = ET.fromstring(heat_map(layers))
    assert "script" not in heat_map(layers)
    texts = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "layer 1" in texts and texts.count("0.0") == 3 and texts.count("100") == 7
    many = [type(layers[0])(**(vars(layers[0]) | {"layer": n})) for n in range(1, 93)]
    assert len([t for t in ET.fromstring(heat_map(many)).iter("{http://www.w3.org/2000/svg}text")
                if (t.text or "").startswith("layer ")]) <= 24


# ---- drift and stored layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("", False), ("The answer is 12.\n#### 12", False), ("abc" * 30, True), ("x" * 59, False), ("x" * 60, True),
        ("Start. " + "She has 3 apples. " * 5, True), ("Start. " + "She has 3 apples. " * 2, False),
        ("She has 3 apples. " * 9 + "So the answer is a number that was not yet said, namely 5.", False),
    ],
)
def test_loops(text: str, loop: bool) -> None:
    assert in_loop(text) is loop


def test_first_difference() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b"], ["a", "c"]) == 1
    assert first_difference("abc", "abcd") == 3


def test_drift_moves_when_answers_fall_into_loops() -> None:
    n, looping = 200, "So it is 4. " * 30
    base, cand = arm("baseline", [True] * n), arm("candidate", [True] * n)
    quiet = drift_evidence(pair(base, cand))
    assert not quiet.moved and quiet.metrics["texts_differ"] == 0 and quiet.metrics["length_ratio"] == 1
    for index in range(12):
        changed = item(index, True, text=looping)
        cand.items[changed.item] = changed  # type: ignore[index]
    loud = drift_evidence(pair(base, cand))
    assert loud.moved and loud.metrics["loops_candidate"] == pytest.approx(12 / n)
    assert loud.metrics["texts_differ"] == pytest.approx(12 / n)
    assert not drift_evidence(pair(cand, base)).moved  # leaving loops is no fault


def test_layers_are_stored_explained_and_read_back(tmp_path: Path) -> None:
    found = {"candidate": [explained(LayerEvidence("routing", True, "many flips", {"limit": 0.005}, "<svg/>"))]}
    save(tmp_path, found)
    (back,) = load(tmp_path)["candidate"]
    assert back == found["candidate"][0] and "bias" in str(back.metrics["look at"])
    assert load(tmp_path / "other") == {}
    (tmp_path / "layers.json").write_text("{")
    with pytest.raises(JournalError, match="is damaged"):
        load(tmp_path)
