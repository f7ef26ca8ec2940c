"""Problem families about money: shopping (whole dollars or cents), wages, and accounts that may go below zero."""

from __future__ import annotations

from evals.mini.draft import Draft, NoProblem, insert_anywhere, money, prose
from evals.mini.rng import Rng
from evals.mini.words import CITIES, GOODS, NAMES

BILLS = (10, 20, 50, 100, 200, 500)


def shopping(rng: Rng, steps: int) -> Draft:
    """Items bought, running total, then coupon, percentage discount, change or an equal split.

    In a problem with cents every amount of money has two decimals; in one without none has.
    """
    draft = Draft()
    cents = rng.chance(0.4)
    odd = cents and rng.chance(0.4)  # prices that are no quarters of a dollar
    unit = 100 if cents else 1
    write = money if cents else str
    who, other = rng.sample(NAMES, 2)
    items = rng.between(1, min(4, (steps + 1) // 2))
    extra = steps - (2 * items - 1)
    if extra > 4:
        items += (extra - 3) // 2
        extra = steps - (2 * items - 1)
    goods = rng.sample(GOODS, items + 1)
    bought, costs = [], []
    for good in goods[:items]:
        count = rng.between(2, 9 if cents else 12)
        price = rng.between(2, 24) * 25 if cents else rng.between(2, 15)
        if odd:
            price = rng.between(21, 399) * 5
        bought.append(f"{count} {good} at ${write(price)} each")
        draft.step(f"The {good} cost", f"{count}*{write(price)}", write(count * price), " dollars.")
        costs.append(count * price)
    total = costs[0]
    for cost in costs[1:]:
        draft.step("The total so far is", f"{write(total)}+{write(cost)}", write(total + cost), " dollars.")
        total += cost
    listing = bought[0] if items == 1 else ", ".join(bought[:-1]) + " and " + bought[-1]
    draft.facts.append(f"{who} buys {listing}.")
    ending = ""
    if extra in (1, 3) or (extra == 4) or (extra == 2 and rng.chance(0.5)):
        ending = rng.pick(("change", "change", "share", "coupon"))
    middle = extra - bool(ending)
    if middle >= 2:
        rates = [p for p in (10, 20, 25, 50) if total * p % 100 == 0]
        if not rates:
            raise NoProblem
        rate = rng.pick(rates)
        off = total * rate // 100
        draft.facts.append(f"The store takes {rate}% off the total.")
        draft.step("The discount is", f"{write(total)}*{rate}/100", write(off), " dollars.")
        draft.step("After the discount it is", f"{write(total)}-{write(off)}", write(total - off), " dollars.")
        total -= off
        middle -= 2
    if middle == 1:
        fee = rng.between(2, 9) * unit
        draft.facts.append(f"Wrapping costs ${write(fee)} more.")
        draft.step("With wrapping it is", f"{write(total)}+{write(fee)}", write(total + fee), " dollars.")
        total += fee
    draft.question = f"How many dollars does {who} pay?"
    if ending == "coupon":
        low = total // unit
        if low < 4:
            raise NoProblem
        off = rng.between(2, min(12, low - 1)) * unit
        draft.facts.append(f"{who} has a coupon for ${write(off)} off.")
        draft.step("With the coupon it is", f"{write(total)}-{write(off)}", write(total - off), " dollars.")
    elif ending == "change":
        notes = [b for b in BILLS if b * unit > total]
        if not notes:
            raise NoProblem
        note = notes[0] * unit
        draft.facts.append(f"{who} pays with ${write(note)}.")
        draft.question = f"How many dollars of change does {who} get?"
        draft.step("The change is", f"{write(note)}-{write(total)}", write(note - total), " dollars.")
    elif ending == "share":
        ways = [k for k in (2, 3, 4, 5) if total % k == 0]
        if not ways:
            raise NoProblem
        k = rng.pick(ways)
        draft.facts.append(f"{who} shares the cost equally with {k - 1} friend{'s' if k > 2 else ''}.")
        draft.question = f"How many dollars does each of the {k} people pay?"
        draft.step("Each pays", f"{write(total)}/{k}", write(total // k), " dollars.")
    if rng.chance(0.35):
        price = rng.between(2, 24) * 25 if cents else rng.between(2, 15)
        extra_fact = rng.pick((
            f"The store also sells {goods[-1]} at ${write(price)} each.",
            f"{other} pays ${write(price)} for {goods[-1]}.",
        ))  # fmt: skip
        insert_anywhere(rng, draft.facts, extra_fact, 0)
    return draft


def wages(rng: Rng, steps: int) -> Draft:
    """Hours a day, days, pay an hour; then bonuses, costs and savings, one step each."""
    draft = Draft()
    who, other = rng.sample(NAMES, 2)
    hours, days, pay = rng.between(2, 9), rng.between(2, 6), rng.between(6, 19)
    worked = hours * days
    facts = [f"{who} works {hours} hours a day for {days} days.", f"{who} earns ${pay} an hour."]
    draft.step(f"{who} works", f"{hours}*{days}", worked, " hours.")
    value = worked * pay
    draft.step(f"{who} earns", f"{worked}*{pay}", value, " dollars.")
    if rng.chance(0.4):
        facts.reverse()
    goal = steps > 2 and rng.chance(0.35)
    changes = steps - 2 - goal
    weeks = changes > 0 and value <= 400 and rng.chance(0.3)
    if weeks:
        k = rng.between(2, 4)
        facts.append(f"{who} does the same in each of {k} weeks.")
        draft.step(f"In {k} weeks that is", f"{value}*{k}", value * k, " dollars.")
        value *= k
        changes -= 1
    for _ in range(changes):
        d = rng.between(5, 95)
        if rng.chance(0.5) or value < 150:
            facts.append(rng.pick((f"{who} gets a bonus of ${d}.", f"{who} sells a bike for ${d}.")))
            draft.step(f"Now {who} has", f"{value}+{d}", value + d, " dollars.")
            value += d
        else:
            facts.append(rng.pick((f"{who} spends ${d} on food.", f"{who} pays ${d} for rent.")))
            draft.step(f"Now {who} has", f"{value}-{d}", value - d, " dollars.")
            value -= d
    if rng.chance(0.35):
        insert_anywhere(rng, facts, f"{other} earns ${rng.between(6, 19)} an hour.", 1)
    draft.facts = facts
    draft.question = f"How many dollars does {who} have in the end?"
    if goal:
        price = value + rng.between(10, 300)
        facts.append(f"{who} wants a boat that costs ${prose(str(price))}.")
        draft.question = f"How many more dollars does {who} need?"
        draft.step(f"{who} still needs", f"{price}-{value}", price - value, " dollars.")
    return draft


def below_zero(rng: Rng, steps: int) -> Draft:
    """A temperature or an account that goes up and down, also below zero."""
    draft = Draft()
    hot = rng.chance(0.5)
    value = rng.between(-20, 30) if hot else rng.between(-40, 90)
    town, away = rng.sample(CITIES, 2)
    who = rng.pick(NAMES)
    if hot:
        draft.facts.append(f"In the {town} town it is {value} degrees.")
        up = ("It gets {} degrees warmer.", "The temperature rises by {} degrees.")
        down = ("It gets {} degrees colder.", "The temperature falls by {} degrees.")
        lead, tail, largest = "Now it is", " degrees.", 30
    else:
        draft.facts.append(f"The balance of {who} is {value} dollars.")
        up = ("{who} pays in {} dollars.", "{who} is paid {} dollars.")
        down = ("{who} takes out {} dollars.", "A bill of {} dollars is taken off.")
        lead, tail, largest = "Now the balance is", " dollars.", 95
    compare = steps > 2 and rng.chance(0.3)
    for _ in range(steps - compare):
        d = rng.between(2, largest)
        if value > 120 or (value > -80 and rng.chance(0.55)):
            draft.facts.append(rng.pick(down).format(d, who=who))
            draft.step(lead, f"{value}-{d}", value - d, tail)
            value -= d
        else:
            draft.facts.append(rng.pick(up).format(d, who=who))
            draft.step(lead, f"{value}+{d}", value + d, tail)
            value += d
    draft.question = "How many degrees is it in the end?" if hot else "What is the balance in dollars in the end?"
    if hot and (compare or rng.chance(0.3)):
        there = rng.between(-25, 35)
        draft.facts.append(f"In the {away} town it is {there} degrees.")
        if not compare:
            draft.question = f"How many degrees is it in the {town} town in the end?"
        elif there == value:
            raise NoProblem
        else:
            warm, cold = max(value, there), min(value, there)
            draft.question = "By how many degrees do the two towns differ in the end?"
            draft.step("The difference is", f"{warm}-{cold}" if cold >= 0 else f"{warm}-({cold})", warm - cold, tail)
    elif compare:
        limit = value + rng.between(5, 95)
        draft.facts.append(f"{who} needs a balance of {limit} dollars.")
        draft.question = f"How many dollars is {who} short of that in the end?"
        less = f"{value}" if value >= 0 else f"({value})"
        draft.step(f"{who} is short of", f"{limit}-{less}", limit - value, tail)
    return draft
