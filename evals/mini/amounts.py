"""Problem families about amounts of one thing: percentages and fractions, rates of work, unit conversion."""

from __future__ import annotations

from evals.mini.draft import Draft, NoProblem, insert_anywhere, prose
from evals.mini.rng import Rng
from evals.mini.words import NAMES, PLANT_WORK, STORES, UNITS, WORK

PERCENTS = (10, 20, 25, 30, 40, 50, 60, 75)
ODD_PERCENTS = (5, 15, 35, 45, 55, 65, 70, 80, 85, 90)
FRACTIONS = ((1, 2), (1, 3), (2, 3), (1, 4), (3, 4), (1, 5), (2, 5), (3, 5), (1, 6), (1, 10), (3, 10))
LEAVE = (("sold", "are sold"), ("lost", "are lost"), ("moved", "are moved away"), ("broken", "are broken"))


def _parts(rng: Rng, steps: int, percent: bool) -> Draft:
    """A store whose stock shrinks or grows by parts (two steps each) and by plain amounts (one step each)."""
    draft = Draft()
    place, thing = rng.pick(STORES)
    large = rng.chance(0.25)
    value = rng.between(30, 180) * 20 if large else rng.between(3, 30) * 20
    percents = PERCENTS + ODD_PERCENTS if large else PERCENTS
    top = 4000 if large else 900
    draft.facts.append(f"A {place} has {prose(str(value))} {thing}.")
    left, used = steps, 0
    while left:
        fits: list[tuple[int, int]] = []
        if left >= 2 and value >= 12:
            fits = (
                [(p, 100) for p in percents if value * p % 100 == 0]
                if percent
                else [(a, b) for a, b in FRACTIONS if value % b == 0]
            )
        if fits and rng.chance(0.75):
            a, b = rng.pick(fits)
            part = value * a // b
            words = f"{a}%" if percent else f"{a}/{b}"
            expr = f"{value}/{b}" if a == 1 else f"{value}*{a}/{b}"
            left, used = left - 2, used + 1
            if value + part <= top and rng.chance(0.3):
                draft.facts.append(f"Then the number of {thing} grows by {words}.")
                draft.step("The growth is", expr, part, f" {thing}.")
                draft.step("Now there are", f"{value}+{part}", value + part, f" {thing}.")
                value += part
            else:
                past, phrase = rng.pick(LEAVE)
                draft.facts.append(f"Then {words} of the {thing} {phrase}.")
                draft.step(f"The number {past} is", expr, part, f" {thing}.")
                draft.step("That leaves", f"{value}-{part}", value - part, f" {thing}.")
                value -= part
            continue
        left -= 1
        up = value < 30 or (value < top - 200 and rng.chance(0.5))
        d = rng.between(2, 60) if up else rng.between(2, min(60, value - 5))
        if left >= 2 and rng.chance(0.7):  # make the stock divisible again, so that a part can follow
            d = (-value) % 20 or 20 if up else (value % 20 or 20)
            if not up and value - d < 20:
                raise NoProblem
        if up:
            draft.facts.append(rng.pick((f"Then {d} more {thing} arrive.", f"The {place} gets {d} more {thing}.")))
            draft.step("Now there are", f"{value}+{d}", value + d, f" {thing}.")
            value += d
        else:
            draft.facts.append(rng.pick((f"Then {d} {thing} are sent back.", f"The {place} gives {d} {thing} away.")))
            draft.step("Now there are", f"{value}-{d}", value - d, f" {thing}.")
            value -= d
    if not used:
        raise NoProblem
    if rng.chance(0.3):
        insert_anywhere(rng, draft.facts, f"The {place} is {rng.between(2, 90)} years old.")
    draft.question = f"How many {thing} does the {place} have in the end?"
    return draft


def percentages(rng: Rng, steps: int) -> Draft:
    """Stock that changes by percentages."""
    return _parts(rng, steps, percent=True)


def fractions(rng: Rng, steps: int) -> Draft:
    """Stock that changes by fractions."""
    return _parts(rng, steps, percent=False)


def rates(rng: Rng, steps: int) -> Draft:
    """Work at several rates, running total, then what is left of a goal, the time for it, or the pay."""
    draft = Draft()
    who, other = rng.sample(NAMES, 2)
    size = rng.between(1, 100)  # how large the products are
    noun, verb, base = rng.pick(WORK if size <= 60 else PLANT_WORK)
    period, periods = rng.pick((("day", "days"), ("hour", "hours"), ("week", "weeks")))
    legs = rng.between(1, min(4, (steps + 1) // 2))
    extra = steps - (2 * legs - 1)
    while extra > 3:
        legs += 1
        extra = steps - (2 * legs - 1)
    parts = []
    for i in range(legs):
        rate, count = rng.between(3, 25), rng.between(2, 9)
        if size > 85:
            rate, count = rng.between(101, 499), rng.between(12, 39)
        elif size > 60:
            rate, count = rng.between(13, 99), rng.between(13, 49)
        opening = f"{who} {verb}" if i == 0 else f"Then {who} {verb}"
        draft.facts.append(f"{opening} {rate} {noun} each {period} for {count} {periods}.")
        draft.step(f"In {count} {periods} {who} {verb}", f"{rate}*{count}", rate * count, f" {noun}.")
        parts.append(rate * count)
    total = parts[0]
    for part in parts[1:]:
        draft.step("So far that is", f"{total}+{part}", total + part, f" {noun}.")
        total += part
    draft.question = f"How many {noun} does {who} {base} in all?"
    if extra == 3:
        d = rng.between(2, 60)
        draft.facts.append(f"At last {who} {verb} {d} more {noun}.")
        draft.step("So far that is", f"{total}+{d}", total + d, f" {noun}.")
        total += d
        extra -= 1
    if extra == 1 and rng.chance(0.5):
        pay = rng.between(2, 6)
        draft.facts.append(f"{who} gets ${pay} for each of the {noun}.")
        draft.question = f"How many dollars does {who} get?"
        draft.step(f"{who} gets", f"{total}*{pay}", total * pay, " dollars.")
    elif extra:
        speed, time = rng.between(2, 12), rng.between(2, 12)
        rest = speed * time if extra == 2 else rng.between(3, 150)
        draft.facts.append(f"The goal is {prose(str(total + rest))} {noun}.")
        draft.question = f"How many {noun} are left to reach the goal?"
        draft.step(f"{who} still has to {base}", f"{total + rest}-{total}", rest, f" {noun}.")
        if extra == 2:
            draft.facts.append(f"For the rest {who} {verb} {speed} {noun} each {period}.")
            draft.question = f"How many {periods} does the rest take?"
            draft.step("The rest takes", f"{rest}/{speed}", time, f" {periods}.")
    if rng.chance(0.35):
        insert_anywhere(rng, draft.facts, f"{other} {verb} {rng.between(3, 25)} {noun} each {period}.", 0)
    return draft


def conversions(rng: Rng, steps: int) -> Draft:
    """A length or time given in a big unit, changed in small and big units, asked in the small one."""
    draft = Draft()
    big, small, factor, thing, how = rng.pick(UNITS)
    top = 9000 if factor == 1000 else 1500
    count = rng.between(2, 9)
    value = count * factor
    draft.facts.append(f"A {thing} is {count} {big} {how}.")
    draft.step(f"The {thing} is", f"{count}*{factor}", value, f" {small} {how}.")
    left = steps - 1
    cut = left > 0 and rng.chance(0.3)
    left -= cut
    while left:
        if left >= 2 and rng.chance(0.4):
            k = rng.between(2, 4)
            size, expr, cost = k * factor, f"{k} {big}", 2
        else:
            k = rng.between(1, 9) * 50 if factor == 1000 else rng.between(3, 95)
            size, expr, cost = k, f"{k} {small}", 1
        longer = value - size < 5 or (value + size <= top and rng.chance(0.5))
        if value + size > top and longer:
            raise NoProblem
        verb = "longer" if longer else "shorter"
        verb = {"wide": {"longer": "wider", "shorter": "narrower"}}.get(how, {}).get(verb, verb)
        draft.facts.append(f"It is made {expr} {verb}.")
        if cost == 2:
            draft.step("The change is", f"{k}*{factor}", size, f" {small}.")
        sign = "+" if longer else "-"
        value = value + size if longer else value - size
        draft.step("Now it is", f"{value - size if longer else value + size}{sign}{size}", value, f" {small} {how}.")
        left -= cost
    if rng.chance(0.3):
        insert_anywhere(rng, draft.facts, f"Another {thing} is {rng.between(2, 9)} {big} {how}.")
    draft.question = f"How many {small} {how} is it in the end?"
    if cut:
        ways = [k for k in (2, 3, 4, 5, 6, 8, 10) if value % k == 0 and value // k > 1]
        if not ways:
            raise NoProblem
        k = rng.pick(ways)
        draft.facts.append(f"Then it is split into {k} equal parts.")
        draft.question = f"How many {small} {how} is each part?"
        draft.step("Each part is", f"{value}/{k}", value // k, f" {small} {how}.")
    return draft
