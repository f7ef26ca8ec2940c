"""An independent check of solutions: a small exact parser for `<<expression=value>>`, and the rules of the format.

It shares no code with the generator: expressions are parsed and evaluated again with `fractions.Fraction`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_STEP = re.compile(r"<<([^<>=]+)=([^<>=]+)>>(-?[\d,]+(?:\.\d+)?)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PROSE = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d{1,3})(?:\.\d+)?")
_FINAL = re.compile(r"#### (-?[\d,]+(?:\.\d+)?)")


class StepError(ValueError):
    """A solution that breaks the arithmetic or the format; the message says where."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, + - * / and parentheses.

    Grammar: sum = product (("+"|"-") product)*; product = factor (("*"|"/") factor)*;
    factor = "-" factor | "(" sum ")" | digits ["." digits].
    Raises StepError on anything else and on a division by zero.
    """
    position = 0

    def peek() -> str:
        return expression[position] if position < len(expression) else ""

    def total() -> Fraction:
        nonlocal position
        value = product()
        while peek() in ("+", "-"):
            operator = peek()
            position += 1
            right = product()
            value = value + right if operator == "+" else value - right
        return value

    def product() -> Fraction:
        nonlocal position
        value = factor()
        while peek() in ("*", "/"):
            operator = peek()
            position += 1
            right = factor()
            if operator == "/" and right == 0:
                raise StepError(f"division by zero in {expression!r}")
            value = value * right if operator == "*" else value / right
        return value

    def factor() -> Fraction:
        nonlocal position
        if peek() == "-":
            position += 1
            return -factor()
        if peek() == "(":
            position += 1
            value = total()
            if peek() != ")":
                raise StepError(f"no closing parenthesis in {expression!r}")
            position += 1
            return value
        match = _NUMBER.match(expression, position)
        if not match:
            raise StepError(f"expected a number at {position} in {expression!r}")
        position = match.end()
        return Fraction(match[0])

    value = total()
    if position != len(expression):
        raise StepError(f"left over at {position} in {expression!r}")
    return value


def prose_value(text: str) -> Fraction:
    """The value of a number as running text writes it; thousands separators must be right or absent below 1,000."""
    if not _PROSE.fullmatch(text):
        raise StepError(f"{text!r} is not written as running text writes a number")
    return Fraction(text.replace(",", ""))


@dataclass(frozen=True, slots=True)
class Checked:
    """A solution found right: how many steps it has and its final value."""

    steps: int
    value: Fraction
    expressions: tuple[str, ...]


def check(answer: str) -> Checked:
    """Check a whole solution; raises StepError naming the first line that is wrong.

    Every line but the last holds exactly one step, its value is the expression's, the running text repeats both, and
    the last line is `#### value` with the value of the last step.
    """
    *lines, last = answer.split("\n")
    expressions: list[str] = []
    value = Fraction(0)
    for line in lines:
        found = _STEP.findall(line)
        if len(found) != 1 or line.count("<<") != 1:
            raise StepError(f"not exactly one step in {line!r}")
        expression, result, shown = found[0]
        value = evaluate(expression)
        if value != Fraction(result):
            raise StepError(f"{expression} is {value}, not {result}, in {line!r}")
        if prose_value(shown) != value:
            raise StepError(f"the text shows {shown}, the step {result}, in {line!r}")
        before = line.split("<<")[0]
        if not before.endswith("=") or not before[:-1].replace(",", "").endswith(expression):
            raise StepError(f"the text before << does not repeat {expression!r} in {line!r}")
        expressions.append(expression)
    final = _FINAL.fullmatch(last)
    if not final or not expressions:
        raise StepError(f"no final line in {last!r}")
    if prose_value(final[1]) != value:
        raise StepError(f"final line {last!r} does not give the last step's value {value}")
    return Checked(len(expressions), value, tuple(expressions))
