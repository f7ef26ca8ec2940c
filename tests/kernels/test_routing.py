"""Routing against transformers' own routers, hand-worked rows, and its behaviour at the edges."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.errors import ContractError
from moe_kernels.records import RoutingConfig
from moe_kernels.routing import near_tie_gap, route, routing_agreement, selection_scores


def _stock_glm(logits: torch.Tensor, bias: torch.Tensor, config: RoutingConfig):
    """ids and weights from transformers' Glm4MoeTopkRouter, fed logits through an identity weight."""
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    e = config.num_experts
    router = Glm4MoeTopkRouter(Glm4MoeConfig(
        hidden_size=e, n_routed_experts=e, num_experts_per_tok=config.top_k, n_group=config.n_group,
        topk_group=config.topk_group, norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor))
    with torch.no_grad():
        router.weight.copy_(torch.eye(e))
        router.e_score_correction_bias.copy_(bias)
        _, weights, ids = router(logits)
    return ids, weights


def _by_id(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort(-1)
    return ids.gather(-1, order), weights.gather(-1, order)


@pytest.mark.parametrize("tokens", [1, 3, 5, 7, 64])
@pytest.mark.parametrize(
    "config",
    [
        RoutingConfig(16, 4, routed_scaling_factor=1.0),
        RoutingConfig(128, 8, routed_scaling_factor=2.5),
        RoutingConfig(256, 8, n_group=8, topk_group=4, routed_scaling_factor=2.5),
        RoutingConfig(8, 3, n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=1.8),
    ],
)
def test_agrees_with_transformers(config: RoutingConfig, tokens: int) -> None:
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, config.num_experts) * 2
    bias = torch.rand(config.num_experts) * 0.4 + 6.8
    ids, weights = _by_id(*_stock_glm(logits, bias, config))
    mine = route(logits, bias, config)
    my_ids, my_weights = _by_id(mine.ids, mine.weights)
    assert torch.equal(my_ids, ids)
    # the sum over k runs in another order: one rounding of a sum of k scores, then of the quotient
    torch.testing.assert_close(my_weights, weights, rtol=5e-7, atol=0)
    assert mine.ids.dtype == torch.int64 and mine.weights.dtype == torch.float32


def test_agrees_with_qwen3_moe() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(0)
    for norm in (True, False):
        router = Qwen3MoeTopKRouter(Qwen3MoeConfig(
            hidden_size=16, num_experts=16, num_experts_per_tok=4, norm_topk_prob=norm))
        with torch.no_grad():
            router.weight.copy_(torch.eye(16))
        logits = torch.randn(7, 16)
        _, weights, ids = router(logits)
        mine = route(logits, None, RoutingConfig(16, 4, scoring="softmax", norm_topk_prob=norm))
        assert torch.equal(mine.ids, ids)
        torch.testing.assert_close(mine.weights, weights, rtol=5e-7, atol=0)


def test_bias_selects_but_does_not_weigh() -> None:
    # sigmoid: 0.5, 0.2, 0.8, 0.1 -> with bias 0.5, 0.9, 0.8, 0.1: experts 1 and 2, weights 0.2 and 0.8
    scores = torch.tensor([[0.5, 0.2, 0.8, 0.1]])
    routing = route(scores.logit(), torch.tensor([0.0, 0.7, 0.0, 0.0]), RoutingConfig(4, 2))
    ids, weights = _by_id(routing.ids, routing.weights)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.8]]))


def test_dropped_group_is_masked_with_minus_infinity() -> None:
    """With all keys negative a 0/1 mask would pick the dropped group (kernels.md §5.3)."""
    scores = torch.tensor([[0.2, 0.3, 0.1, 0.1]])
    bias = torch.full((4,), -5.0)
    routing = route(scores.logit(), bias, RoutingConfig(4, 2, n_group=2, topk_group=1))
    assert sorted(routing.ids[0].tolist()) == [0, 1]
    _, keys = selection_scores(scores.logit(), bias, RoutingConfig(4, 2, n_group=2, topk_group=1))
    assert keys[0, 2:].tolist() == [float("-inf")] * 2


def test_bf16_bias_is_rounded_then_added_in_fp32() -> None:
    # near 7 the BF16 step is 1/32: 6.99 -> 7.0, 7.01 -> 7.0; FP32 prefers expert 1, BF16 the higher score
    bias = torch.tensor([6.99, 7.01, 0.0, 0.0])
    scores = torch.tensor([[0.505, 0.5, 0.1, 0.1]])
    config = RoutingConfig(4, 1)
    assert route(scores.logit(), bias, config).ids.tolist() == [[1]]
    assert route(scores.logit(), bias, config, bias_dtype=torch.bfloat16).ids.tolist() == [[0]]
    # added in FP32: keys still separate scores that BF16 keys (step 1/32) could not
    _, keys = selection_scores(scores.logit(), bias, config, bias_dtype=torch.bfloat16)
    torch.testing.assert_close(keys, scores + torch.tensor([7.0, 7.0, 0.0, 0.0]))


def test_bf16_bias_changes_the_sets_that_the_reference_reports() -> None:
    """kernels.md §5.6: bias U[6.817, 7.063], E 256, top 8: 50.6 % of sets differ, overlap 7.44 of 8."""
    torch.manual_seed(0)
    logits = torch.randn(4096, 256)
    bias = torch.rand(256) * (7.063 - 6.817) + 6.817
    config = RoutingConfig(256, 8)
    agreement = routing_agreement(
        route(logits, bias, config).ids, route(logits, bias, config, bias_dtype=torch.bfloat16).ids)
    # other draws of bias and logits: the share moves by a few points between seeds
    assert 1 - agreement.exact_share == pytest.approx(0.506, abs=0.06)
    assert agreement.mean_overlap * 8 == pytest.approx(7.44, abs=0.1)


def test_ties_go_to_the_lowest_id() -> None:
    config = RoutingConfig(8, 3)
    routing = route(torch.zeros(5, 8), torch.zeros(8), config)
    assert routing.ids.tolist() == [[0, 1, 2]] * 5
    grouped = route(torch.zeros(5, 8), torch.zeros(8), RoutingConfig(8, 3, n_group=4, topk_group=2))
    assert grouped.ids.tolist() == [[0, 1, 2]] * 5


@pytest.mark.parametrize("value", [-20.0, -88.0, -104.0, -1e4, float("-inf"), 200.0, float("inf")])
def test_extreme_logits_give_finite_weights(value: float) -> None:
    logits = torch.full((3, 16), value)
    logits[1, 3] = value + 1 if value < 0 else value
    for bias in (torch.full((16,), 12.0), torch.zeros(16)):
        routing = route(logits, bias, RoutingConfig(16, 4, routed_scaling_factor=2.5))
        assert routing.weights.isfinite().all()
        assert (routing.weights >= 0).all() and (routing.weights.sum(-1) <= 2.5 * 1.0001).all()


def test_cancellation_does_not_touch_the_weights() -> None:
    """sigmoid(-16) ~ 1e-7: (s + 12) - 12 would be 0; weights taken from s keep their ratio (#30989)."""
    logits = torch.tensor([[-16.0, -17.0, -60.0, -60.0]])
    routing = route(logits, torch.full((4,), 12.0), RoutingConfig(4, 2))
    expected = logits[:, :2].double().sigmoid()
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(_by_id(*vars(routing).values())[1].double(), expected, rtol=1e-5, atol=0)


def test_nan_logits_stay_visible() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 2] = float("nan")
    weights = route(logits, torch.zeros(4), RoutingConfig(4, 2)).weights
    assert weights[0].isnan().any() and weights[1].isfinite().all()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (RoutingConfig(8, 9), "top_k=9"),
        (RoutingConfig(8, 3, n_group=4, topk_group=1), "top_k=3"),
        (RoutingConfig(8, 2, n_group=3), "n_group=3"),
        (RoutingConfig(8, 2, n_group=2, topk_group=3), "topk_group=3"),
    ],
)
def test_meaningless_configurations_are_refused(config: RoutingConfig, name: str) -> None:
    with pytest.raises(ContractError, match=name):
        route(torch.zeros(1, 8), None, config)


def test_wrong_number_of_experts_is_refused() -> None:
    with pytest.raises(ContractError, match=r"\[T, 8\]"):
        route(torch.zeros(1, 4), None, RoutingConfig(8, 2))


def test_agreement_counts() -> None:
    a = torch.tensor([[[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [7, 8, 9]]], dtype=torch.int16)
    b = torch.tensor([[[2, 0, 1], [3, 4, 6]], [[5, 6, 7], [9, 1, 8]]], dtype=torch.int16)
    agreement = routing_agreement(a, b)
    assert agreement.exact.tolist() == [[True, False], [False, False]]
    assert agreement.overlap.tolist() == [[3, 2], [0, 2]]
    assert agreement.exact_share == 0.25
    assert agreement.mean_overlap == pytest.approx(7 / 12)


def test_agreement_against_python_sets() -> None:
    torch.manual_seed(1)
    a = torch.stack([torch.randperm(32)[:6] for _ in range(200)])
    b = torch.stack([torch.randperm(32)[:6] for _ in range(200)])
    agreement = routing_agreement(a, b)
    common = [len(set(x) & set(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert agreement.overlap.tolist() == common
    assert agreement.exact_share == sum(c == 6 for c in common) / 200


def test_agreement_refuses_other_shapes() -> None:
    with pytest.raises(ContractError, match="shape"):
        routing_agreement(torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("value", "dtype", "step"),
    [(7.0, torch.bfloat16, 1 / 32), (4.0, torch.bfloat16, 1 / 32), (3.99, torch.bfloat16, 1 / 64),
     (11.2, torch.bfloat16, 1 / 16), (34.5, torch.bfloat16, 1 / 4), (7.0, torch.float16, 2**-8),
     (7.0, torch.float32, 2.0**-21)],
)
def test_near_tie_step(value: float, dtype: torch.dtype, step: float) -> None:
    gap = near_tie_gap(torch.tensor([[value + 1, value, value - 0.02, 0.0]]), 2, dtype)
    assert gap.step.tolist() == [step]
    torch.testing.assert_close(gap.gap, torch.tensor([0.02]), rtol=1e-3, atol=0)
    assert gap.tie.tolist() == [step >= 0.02]


def test_near_tie_explains_every_flip_of_a_rounded_bias() -> None:
    """Rounding the bias moves a key by half a step at most, so a flip needs a gap of at most one step."""
    torch.manual_seed(2)
    logits, bias, config = torch.randn(2000, 64), torch.rand(64) * 0.25 + 6.8, RoutingConfig(64, 4)
    flips = ~routing_agreement(
        route(logits, bias, config).ids, route(logits, bias, config, bias_dtype=torch.bfloat16).ids).exact
    tie = near_tie_gap(selection_scores(logits, bias, config)[1], 4, torch.bfloat16).tie
    assert flips.any()
    assert (tie | ~flips).all()


def test_gap_is_infinite_when_nothing_is_rejected() -> None:
    assert near_tie_gap(torch.rand(3, 4), 4, torch.float32).gap.tolist() == [float("inf")] * 3
    keys = torch.tensor([[1.0, 2.0, float("-inf"), float("-inf")]])
    assert near_tie_gap(keys, 2, torch.float32).gap.tolist() == [float("inf")]
