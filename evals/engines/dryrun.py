"""`--dry-run`: the commands, addresses, attestation and protocol of every arm, without starting anything."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from evals.engines import attest
from evals.engines.command import plan
from evals.engines.load import EngineVariant


def lines(arm: str, variant: EngineVariant, port: int = 30000) -> Iterator[str]:
    """One arm as shell text with comments."""
    spec = variant.spec
    made = plan(variant, spec.port or port, container=f"moe-parity-{arm.replace(':', '-')}")
    yield f"# {arm}: {variant.name} ({variant.path})" + (f": {spec.about}" if spec.about else "")
    for other in made.elsewhere:
        yield from other.splitlines()
    for key, value in made.env.items():
        yield f"export {key}={shlex.quote(value)}"
    yield shlex.join(made.command) if made.command else f"# nothing is started here; the server is {made.url}"
    ready = f"{made.url}{spec.ready.path}"
    yield f"# ready when {ready} answers 200 (at most {spec.ready.timeout:g} s; port: {spec.port or 'a free one'})"
    for text in attest.describe(variant):
        yield f"# {text}"
    facts = variant.facts
    for label, fact in (("router bias", facts.bias), ("published GSM8K", facts.gsm8k)):
        if fact:
            yield f"# {label}: {fact}"
    for note in facts.notes:
        yield f"# note: {note}"


def render(arms: Sequence[tuple[str, EngineVariant]], side_by_side: bool, command: str) -> str:
    """The whole dry run."""
    out: list[str] = []
    for name, variant in arms:
        out += [*lines(name, variant), ""]
    how = "all servers at once" if side_by_side else "one server after the other, each stopped before the next starts"
    return "\n".join([*out, f"# then, {how}:", command, ""])
