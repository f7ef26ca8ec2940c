"""Problem families about several people: relations between amounts, and two amounts compared."""

from __future__ import annotations

from evals.mini.draft import Draft, NoProblem, insert_anywhere
from evals.mini.rng import Rng
from evals.mini.words import NAMES, PART_WORD, THINGS, TIMES_WORD

LARGEST = 999


def _relation(rng: Rng, who: str, other: str, amount: int, thing: str) -> tuple[str, str, str, int]:
    """A sentence that gives `who`'s amount from `other`'s; how the solution repeats it; the expression; the value."""
    kinds = []
    if amount <= LARGEST - 60:
        kinds.append("more")
    if amount > 6:
        kinds.append("fewer")
    if amount * 2 <= LARGEST:
        kinds.append("times")
    parts = [k for k in (2, 3, 4) if amount % k == 0 and amount >= 3 * k]
    if parts:
        kinds.append("part")
    kind = rng.pick(kinds)
    if kind == "times":
        k = rng.pick([k for k in (2, 3, 4, 5) if amount * k <= LARGEST])
        word, expr, value = TIMES_WORD[k], f"{amount}*{k}", amount * k
    elif kind == "part":
        k = rng.pick(parts)
        word, expr, value = PART_WORD[k], f"{amount}/{k}", amount // k
    else:
        d = rng.between(2, 60 if kind == "more" else min(60, amount - 2))
        sign = 1 if kind == "more" else -1
        text = f"{who} has {d} {kind} {thing} than {other}."
        if rng.chance(0.4):
            text = f"{who} has {d} {thing} {kind} than {other} has."
        return text, f"{d} {kind} than {other}", f"{amount}{'+' if sign > 0 else '-'}{d}", amount + sign * d
    return f"{who} has {word} as many {thing} as {other}.", f"{word} as many as {other}", expr, value


def relations(rng: Rng, steps: int) -> Draft:
    """A chain of people whose amounts depend on one another, facts shuffled, with people who do not matter."""
    draft, thing = Draft(), rng.pick(THINGS)
    ending = rng.pick(("own", "own", "together", "difference"))
    links = steps - (ending != "own")
    names = rng.sample(NAMES, links + 2)
    amounts = {names[0]: rng.between(3, 60)}
    draft.facts.append(f"{names[0]} has {amounts[names[0]]} {thing}.")
    chain = [names[0]]
    for who in names[1 : links + 1]:
        last = chain[-1]
        if len(chain) > 1 and rng.chance(0.2) and amounts[last] + amounts[chain[-2]] <= LARGEST:
            other = chain[-2]
            draft.facts.append(f"{who} has as many {thing} as {last} and {other} together.")
            how = f"as many as {last} and {other} together"
            expr, value = f"{amounts[last]}+{amounts[other]}", amounts[last] + amounts[other]
        else:
            text, how, expr, value = _relation(rng, who, last, amounts[last], thing)
            draft.facts.append(text)
        draft.step(f"{who} has {how}, so", expr, value, f" {thing}.")
        amounts[who] = value
        chain.append(who)
    # A person who does not matter is always a leaf: nobody's amount depends on theirs.
    extra = names[links + 1]
    if rng.chance(0.3):
        draft.facts.append(f"{extra} has {rng.between(3, 60)} {thing}.")
    elif rng.chance(0.2):
        draft.facts.append(f"{extra} has {rng.between(2, 60)} more {thing} than {rng.pick(chain)}.")
    if rng.chance(0.65):
        rng.shuffle(draft.facts)
    last, other = chain[-1], rng.pick(chain[:-1])
    a, b = amounts[last], amounts[other]
    if ending == "own":
        draft.question = f"How many {thing} does {last} have?"
    elif ending == "together":
        draft.question = f"How many {thing} do {last} and {other} have together?"
        draft.step("Together they have", f"{a}+{b}", a + b, f" {thing}.")
    else:
        if a == b:
            raise NoProblem
        more, fewer = (last, other) if a > b else (other, last)
        draft.question = f"How many more {thing} does {more} have than {fewer}?"
        draft.step("The difference is", f"{max(a, b)}-{min(a, b)}", abs(a - b), f" {thing}.")
    return draft


def _collect(rng: Rng, draft: Draft, who: str, thing: str, steps: int) -> tuple[int, list[str]]:
    """One person's amount: boxes of things, then gains and losses, one step each."""
    boxes, each = rng.between(2, 9), rng.between(3, 15)
    value = boxes * each
    facts = [f"{who} has {boxes} boxes with {each} {thing} in each box."]
    draft.step(f"{who} starts with", f"{boxes}*{each}", value, f" {thing}.")
    for _ in range(steps - 1):
        if rng.chance(0.5) or value < 12:
            d = rng.between(3, 60)
            facts.append(rng.pick((f"{who} finds {d} more {thing}.", f"{who} is given {d} more {thing}.")))
            draft.step(f"Now {who} has", f"{value}+{d}", value + d, f" {thing}.")
            value += d
        else:
            d = rng.between(2, min(60, value - 5))
            facts.append(rng.pick((f"{who} loses {d} {thing}.", f"{who} gives {d} {thing} away.")))
            draft.step(f"Now {who} has", f"{value}-{d}", value - d, f" {thing}.")
            value -= d
    return value, facts


def comparison(rng: Rng, steps: int) -> Draft:
    """Two people collect separately (their facts may interleave); how many more has one than the other?"""
    if steps < 3:
        raise NoProblem
    draft, thing = Draft(), rng.pick(THINGS)
    one, two, three = rng.sample(NAMES, 3)
    first = rng.between(1, steps - 2)
    a, facts_a = _collect(rng, draft, one, thing, first)
    b, facts_b = _collect(rng, draft, two, thing, steps - 1 - first)
    if a == b:
        raise NoProblem
    if rng.chance(0.5):
        draft.facts = facts_a + facts_b
    else:  # interleave, keeping each person's order; the first sentence stays the first person's
        draft.facts = [facts_a.pop(0)]
        while facts_a or facts_b:
            source = facts_a if facts_a and (not facts_b or rng.chance(0.5)) else facts_b
            draft.facts.append(source.pop(0))
    if rng.chance(0.3):
        insert_anywhere(rng, draft.facts, f"{three} has {rng.between(3, 90)} {thing}.")
    if rng.chance(0.25):
        draft.question = f"How many {thing} do {one} and {two} have in all?"
        draft.step("In all they have", f"{a}+{b}", a + b, f" {thing}.")
    else:
        more, fewer = (one, two) if a > b else (two, one)
        draft.question = f"How many more {thing} does {more} have than {fewer}?"
        draft.step("The difference is", f"{max(a, b)}-{min(a, b)}", abs(a - b), f" {thing}.")
    return draft


def events(rng: Rng, steps: int) -> Draft:
    """One person's things change through a sequence of events; sometimes the rest is sold."""
    draft, thing = Draft(), rng.pick(THINGS)
    who, other = rng.sample(NAMES, 2)
    value = rng.between(5, 90)
    draft.facts.append(rng.pick((f"{who} has {value} {thing}.", f"{who} starts with {value} {thing}.")))
    sell = rng.chance(0.25)
    left = steps - sell
    while left:
        kinds = ["gain", "loss"] if value > 12 else ["gain"]
        if left >= 2:
            kinds += ["packs", "packs"] + (["bags"] if value > 30 else [])
        if value <= 300:
            kinds.append("grow")
        parts = [k for k in (2, 3, 4) if value % k == 0 and value >= 8 * k]
        if parts:
            kinds.append("share")
        kind = rng.pick(kinds)
        left -= 2 if kind in ("packs", "bags") else 1
        now = f"Now {who} has"
        if kind == "gain":
            d = rng.between(3, 90)
            draft.facts.append(rng.pick((
                f"A friend gives {who} {d} more {thing}.", f"{who} finds {d} {thing}.", f"{who} buys {d} more {thing}.",
            )))  # fmt: skip
            draft.step(now, f"{value}+{d}", value + d, f" {thing}.")
            value += d
        elif kind == "loss":
            d = rng.between(2, min(90, value - 4))
            draft.facts.append(rng.pick((
                f"{who} gives {d} {thing} to a neighbor.", f"{who} loses {d} {thing}.", f"{who} uses {d} {thing}.",
            )))  # fmt: skip
            draft.step(now, f"{value}-{d}", value - d, f" {thing}.")
            value -= d
        elif kind == "packs":
            p, q = rng.between(2, 9), rng.between(3, 12)
            draft.facts.append(f"{who} buys {p} packs with {q} {thing} in each pack.")
            draft.step("The packs hold", f"{p}*{q}", p * q, f" {thing}.")
            draft.step(now, f"{value}+{p * q}", value + p * q, f" {thing}.")
            value += p * q
        elif kind == "bags":
            p, q = rng.between(2, 6), rng.between(2, 4)
            draft.facts.append(f"{who} fills {p} bags with {q} {thing} each and gives the bags away.")
            draft.step("The bags hold", f"{p}*{q}", p * q, f" {thing}.")
            draft.step(now, f"{value}-{p * q}", value - p * q, f" {thing}.")
            value -= p * q
        elif kind == "grow":
            k = rng.pick((2, 2, 3))
            draft.facts.append(f"Then the number of {thing} {'doubles' if k == 2 else 'triples'}.")
            draft.step(now, f"{value}*{k}", value * k, f" {thing}.")
            value *= k
        else:
            k = rng.pick(parts)
            draft.facts.append(f"{who} splits the {thing} equally among {k} shelves and keeps only one shelf.")
            draft.step("One shelf holds", f"{value}/{k}", value // k, f" {thing}.")
            value //= k
        if value > LARGEST:
            raise NoProblem
    if rng.chance(0.35):
        insert_anywhere(rng, draft.facts, rng.pick((
            f"{other} has {rng.between(3, 90)} {thing}.", f"{who} also has {rng.between(2, 40)} old hats.",
        )))  # fmt: skip
    if sell:
        price = rng.between(2, 9)
        draft.facts.append(f"{who} sells all of the remaining {thing} for ${price} each.")
        draft.question = f"How many dollars does {who} get?"
        draft.step(f"{who} gets", f"{value}*{price}", value * price, " dollars.")
    else:
        draft.question = f"How many {thing} does {who} have in the end?"
    return draft
