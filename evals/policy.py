"""The limits a verdict is judged by, with their defaults and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass

from evals.errors import UsageError

PROMPT_FACTORS = frozenset({"shots", "template", "data", "endpoint", "chat_template_kwargs"})


@dataclass(frozen=True)
class Policy:
    """Limits of one comparison. Margins are points of accuracy (1.5 = 1.5 percentage points), shares
    fractions.

    - `margin`: largest acceptable drop; 1.5 points is what one pass over 1,319 items shows at 2–4 %
    discordance;
    - `alpha`: one-sided level of both the non-inferiority and the regression claim;
    - `min_drop`: a shown regression smaller than this (points) is no failure;
    - `max_truncated`: share of cut answers above which the token budget, not the kernel, decides (evals T04);
    - `max_empty`, `status_alpha`: share of empty answers, and level of a difference between the arms (T07);
    - `min_baseline`: below this accuracy (or four margins, if that is more) there is too little to lose;
    - `length_low`, `length_high`: MLPerf's tokens-per-sample rule, 90–110 % of the reference;
    - `max_excess_flips`, `flips_alpha`: flips beyond the A/A floor (share of items) and the level of that
    claim;
    - `power`: used only in advice on how many items or repeats are needed.
    """

    margin: float = 1.5
    alpha: float = 0.05
    min_drop: float = 0.0
    power: float = 0.8
    allow_truncated: bool = False
    max_truncated: float = 0.005
    max_empty: float = 0.01
    status_alpha: float = 0.01
    min_baseline: float = 0.20
    length_low: float = 0.9
    length_high: float = 1.1
    max_excess_flips: float = 0.01
    flips_alpha: float = 0.01
    factors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.margin < 100:
            raise UsageError(f"--margin is in points of accuracy, above 0 and below 100; got {self.margin}")
        if not 0 < self.alpha < 0.5:
            raise UsageError(f"--alpha is a one-sided error level above 0 and below 0.5; got {self.alpha}")
        if self.min_drop < 0:
            raise UsageError(f"the smallest drop that counts cannot be negative; got {self.min_drop}")

    @property
    def delta(self) -> float:
        """The margin as a fraction."""
        return self.margin / 100

    @property
    def needed_baseline(self) -> float:
        """Lowest baseline accuracy that can support a claim: `min_baseline`, and four times the margin."""
        return min(max(self.min_baseline, 4 * self.delta), 0.9)

    @property
    def prompts_may_differ(self) -> bool:
        """A declared factor changes the prompts on purpose."""
        return bool(PROMPT_FACTORS.intersection(self.factors))
