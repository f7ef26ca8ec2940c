"""From figures to "moved or not", per layer of evidence: the limits, and why they are what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evals.forced.divergence import LogprobSummary
from evals.forced.routing import LayerAgreement
from evals.rules import LayerEvidence

FLOOR_FACTOR = 5.0


@dataclass(frozen=True)
class Limits:
    """Calibrated on the embedded model and glm4moe-mini (docs/faults.md has every figure).

    - `beyond_ties`: share of tokens, in any MoE layer, whose expert set differs although the choice was no near tie.
      Benign changes of a kernel (BF16 rows, BF16 logits, gate and up in E4M3, other summation order, 2 % noise) gave
      none on the embedded model and at most 0.7 % on glm4moe-mini, a BF16 bias 8 to 22 %, the mildest routing fault
      12 %.
    - `kl_same`: mean KL, nats a token, when both servers hold the same weights, so that only arithmetic may differ.
      Benign changes gave at most 2e-4 on the embedded model; on glm4moe-mini 4e-6 on solutions and 2.1e-3 on texts four
      times as long as it was trained on, where rounding is amplified. llama.cpp's Q8_0, a format, has 1.4e-3.
    - `kl_other`: the same with different weights or formats: evals.md's tripwire of 0.02 (llama.cpp: Q6_K 0.0055,
      Q4_K_M 0.031).
    - `top1`: share of tokens whose most likely token changed.

    Each is raised to FLOOR_FACTOR times what the baseline shows against itself.
    """

    beyond_ties: float = 0.02
    kl_same: float = 5e-3
    kl_other: float = 0.02
    top1: float = 0.02
    gross_nll: float = 0.5  # nats a token on gold solutions, at the lower end of the interval: the model is broken


def routing_evidence(
    layers: Sequence[LayerAgreement], floor: Sequence[LayerAgreement] | None, limits: Limits, gaps_known: bool = True
) -> LayerEvidence:
    """Routing moved if flips beyond near ties pass the limit in a layer.

    Without gaps every flip counts, against ten times the limit: near ties alone flip in some percent of the tokens.
    """
    def beyond(x: LayerAgreement) -> float:
        return x.beyond_ties if gaps_known else 1 - x.exact

    base = limits.beyond_ties * (1 if gaps_known else 10)
    noise = {x.layer: beyond(x) for x in floor or ()}
    limit = {x.layer: max(base, FLOOR_FACTOR * noise.get(x.layer, 0.0)) for x in layers}
    over = [x for x in layers if beyond(x) > limit[x.layer]]
    flips = ", ".join(f"{x.layer}: {100 * (1 - x.exact):.2g}" for x in layers)
    worst = max(layers, key=beyond)
    if over:
        shares = f"{100 * beyond(worst):.1f} % beyond near ties in layer {worst.layer}"
        detail = f"other experts for {flips} % of the tokens (layer: share), {shares} (limit {100 * base:g} %)"
    else:
        detail = f"at most {100 * beyond(worst):.2g} % of the tokens flip beyond near ties (other sets: {flips} %)"
    metrics: dict[str, float | int | str] = {
        "tokens": worst.tokens,
        "worst_layer": worst.layer,
        "beyond_ties_worst": beyond(worst),
        "exact_min": min(x.exact for x in layers),
        "overlap_min": min(x.overlap for x in layers),
        "load_shift_max": max(x.load_shift for x in layers),
        "floor_beyond_ties": max(noise.values(), default=0.0),
        "limit": base,
    }
    metrics |= {f"flips_layer_{x.layer}": 1 - x.exact for x in layers}
    return LayerEvidence("routing", bool(over), detail, metrics)


def logprob_evidence(
    parts: dict[str, LogprobSummary], floor: dict[str, LogprobSummary] | None, same_weights: bool, limits: Limits
) -> LayerEvidence:
    """Logprobs moved if the mean KL or the share of changed top-1 tokens passes its limit on gold or on long texts."""
    base = limits.kl_same if same_weights else limits.kl_other
    moved, said = False, []
    metrics: dict[str, float | int | str] = {"same_weights": int(same_weights), "limit_kl": base}
    for name, s in parts.items():
        if not s.tokens:
            continue
        own = (floor or {}).get(name)
        kl_limit = max(base, FLOOR_FACTOR * own.mean_kl if own else 0.0)
        top_limit = max(limits.top1, FLOOR_FACTOR * (1 - own.top1_agreement) if own else 0.0)
        over = [
            *([f"mean KL {s.mean_kl:.2g} above {kl_limit:.2g}"] if s.mean_kl > kl_limit else []),
            *([f"top-1 changed for {100 * (1 - s.top1_agreement):.2g} % of the tokens, above {100 * top_limit:.2g} %"]
              if 1 - s.top1_agreement > top_limit else []),
        ]
        moved |= bool(over)
        figures = f"mean KL {s.mean_kl:.2g}, top-1 agreement {100 * s.top1_agreement:.2f} %, ΔNLL {s.delta_nll:+.2g}"
        said.append(f"{name}: " + ("; ".join(over) if over else figures))
        metrics |= {
            f"{name}_tokens": s.tokens, f"{name}_mean_kl": s.mean_kl, f"{name}_max_kl": s.max_kl,
            f"{name}_top1": s.top1_agreement, f"{name}_delta_nll": s.delta_nll,
            f"{name}_floor_kl": own.mean_kl if own else 0.0,
        }
    return LayerEvidence("logprobs", moved, " · ".join(said), metrics)


def gross(parts: dict[str, LogprobSummary], limits: Limits) -> str | None:
    """Why the candidate is beyond saving, or None: gold solutions became much less likely."""
    s = parts.get("gold")
    if s is None or not s.tokens or s.delta_nll_low <= limits.gross_nll:
        return None
    return (
        f"gold solutions are {s.delta_nll:.2f} nats a token less likely (95 % from {s.delta_nll_low:.2f}): "
        "the candidate is broken, accuracy need not be run"
    )
