"""Which experts two servers chose for the same tokens: agreement, near ties, load shift, where in the text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evals.errors import ServerError
from evals.forced.records import Scores

# Scores are sigmoids, at most 1; BF16 steps by 2^-8 just below 1. A choice whose margin is smaller could be flipped by
# keeping scores in BF16 anywhere, so it is a near tie; flips beyond that need a real change in front of the choice.
NEAR_TIE = 2.0**-8
BINS = 10  # equal parts of a text


@dataclass
class LayerAgreement:
    """One MoE layer. Shares are of tokens; `load_shift` is the total variation between the experts' loads."""

    layer: int
    tokens: int = 0
    exact: float = 0.0
    overlap: float = 0.0
    near_tie_flips: float = 0.0
    beyond_ties: float = 0.0
    load_shift: float = 0.0
    by_position: tuple[float, ...] = ()


@dataclass
class Agreement:
    """Running totals over texts; memory is a few counters per layer."""

    layers: tuple[int, ...] = ()
    texts: int = 0
    tokens: int = 0
    _exact: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _overlap: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _tie_flips: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _place: np.ndarray = field(default_factory=lambda: np.zeros((0, BINS, 2)))
    _load: np.ndarray = field(default_factory=lambda: np.zeros((2, 0, 0)))
    gaps_known: bool = True

    def add(self, a: Scores, b: Scores) -> None:
        """One text under both servers."""
        if a.routing is None or b.routing is None:
            raise ServerError("the server does not return routing (`return_routing`); only this project's service does")
        if a.routing.layers != b.routing.layers or a.routing.ids.shape != b.routing.ids.shape:
            raise ServerError(f"item {a.item}: the servers route in different layers or over different tokens")
        x, y = np.sort(a.routing.ids, -1), np.sort(b.routing.ids, -1)
        tokens, layers, k = x.shape
        both = np.sort(np.concatenate([x, y], -1), -1)
        shared = (both[..., 1:] == both[..., :-1]).sum(-1)  # ids are distinct within a choice
        exact = shared == k
        if not self.layers:
            self._start(a.routing.layers)
        gaps = a.routing.gaps
        self.gaps_known &= gaps is not None and not np.isnan(gaps).any()
        near = (gaps < NEAR_TIE) if gaps is not None else np.zeros_like(exact)
        self.texts += 1
        self.tokens += tokens
        self._exact += exact.sum(0)
        self._overlap += shared.sum(0) / k
        self._tie_flips += (~exact & near).sum(0)
        place = np.minimum(np.arange(tokens) * BINS // max(tokens, 1), BINS - 1)
        for part in range(BINS):
            rows = exact[place == part]
            self._place[:, part, 0] += rows.sum(0)
            self._place[:, part, 1] += rows.shape[0]
        self._count_load(x, y, layers)

    def _start(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        n = len(layers)
        self._exact, self._overlap, self._tie_flips = np.zeros(n), np.zeros(n), np.zeros(n)
        self._place = np.zeros((n, BINS, 2))

    def _count_load(self, x: np.ndarray, y: np.ndarray, layers: int) -> None:
        experts = int(max(x.max(), y.max())) + 1
        if experts > self._load.shape[2]:
            grown = np.zeros((2, layers, experts))
            grown[:, : self._load.shape[1], : self._load.shape[2]] = self._load
            self._load = grown
        for side, ids in enumerate((x, y)):
            for layer in range(layers):
                self._load[side, layer] += np.bincount(ids[:, layer].ravel(), minlength=self._load.shape[2])

    def by_layer(self) -> list[LayerAgreement]:
        """Figures per MoE layer."""
        out = []
        for i, layer in enumerate(self.layers):
            n = max(self.tokens, 1)
            load = self._load[:, i] / np.maximum(self._load[:, i].sum(-1, keepdims=True), 1)
            flips = n - self._exact[i]
            places = tuple(float(p[0] / p[1]) if p[1] else 1.0 for p in self._place[i])
            out.append(
                LayerAgreement(
                    layer,
                    self.tokens,
                    float(self._exact[i] / n),
                    float(self._overlap[i] / n),
                    float(self._tie_flips[i] / n),
                    float((flips - self._tie_flips[i]) / n),
                    float(np.abs(load[0] - load[1]).sum() / 2),
                    places,
                )
            )
        return out
