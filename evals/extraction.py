"""Our answer extractor: the last explicit marker outside reasoning, compared as exact numbers.

lm-eval's strict and flexible filters are shown beside it unchanged; `evals.md` §1.4's table is its test.
"""

from __future__ import annotations

import re
from fractions import Fraction

EXTRACTOR = "moe-parity-1"  # part of the protocol: change it with any change of behaviour below

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[-\u2212]\s*)?[$€£]?\s*(?P<sign2>[-\u2212])?(?P<a>{_DIGITS})"
    rf"(?:\s*/\s*(?P<b>{_DIGITS}))?(?:\s*(?P<scale>thousand|million|billion)\b)?",
    re.IGNORECASE,
)
_SCALE = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_LATEX = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
_RUN_ON = re.compile(r"\n\s*\n\s*(?:question|q)\b[^\n:]{0,12}:", re.IGNORECASE)
_MARKERS = re.compile(
    r"####"
    r"|\\boxed\s*\{(?P<box>(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
    r"|\b(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is\s*:?|\s*\**\s*:\s*\**|\s*=)",
    re.IGNORECASE,
)
_PAREN = re.compile(r"\([^()]*\)")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")


def strip_reasoning(text: str) -> str | None:
    """The text outside `<think>…</think>`; None when a `<think>` is never closed.

    A lone `</think>` (the template opened it in the prompt) ends the reasoning.
    """
    head, closed, tail = text.rpartition("</think>")
    rest = tail if closed else head + tail
    return None if "<think>" in rest else rest


def _number(match: re.Match[str]) -> Fraction | None:
    value = Fraction(match["a"].replace(",", ""))
    if match["b"]:
        below = Fraction(match["b"].replace(",", ""))
        if below == 0:
            return None
        value /= below
    if match["scale"]:
        value *= _SCALE[match["scale"].lower()]
    return -value if match["sign"] or match["sign2"] else value


def _clean(text: str) -> str:
    text = _FRAC.sub(r"\1/\2", _LATEX.sub(r"\1", text))
    return re.sub(r"\*\*|\\[,;!]|\\(?=[$%])|[`]", "", text)


def _first_number(text: str) -> str | None:
    """The number a marker points at: on its first non-blank line, after the last `=` if there is one."""
    line = next((part for part in text.splitlines() if part.strip(" *:\t")), "")
    line = _clean(line)
    if "=" in line and _NUMBER.search(line.rpartition("=")[2]):
        line = line.rpartition("=")[2]
    match = _NUMBER.search(line)
    return match.group(0).strip() if match else None


def _fallback(text: str) -> str | None:
    """No marker: the last bold number, else the last number outside parentheses."""
    for bold in reversed(_BOLD.findall(text)):
        found = list(_NUMBER.finditer(_clean(bold)))
        if found:
            return found[-1].group(0).strip()
    cleaned = _clean(text)
    found = list(_NUMBER.finditer(_PAREN.sub(" ", cleaned))) or list(_NUMBER.finditer(cleaned))
    return found[-1].group(0).strip() if found else None


def extract(text: str) -> str | None:
    """The answer a completion gives, as written, or None when it gives none.

    Markers are `####`, `\\boxed{}` and "answer is/answer:"; the last one that is followed by a number counts.
    What follows a blank line and a new "Question:" after the first marker is a run-on and is not read.
    """
    visible = strip_reasoning(text)
    if visible is None:
        return None
    first = _MARKERS.search(visible)
    run_on = _RUN_ON.search(visible, first.end() if first else 0)
    if run_on and visible[: run_on.start()].strip():
        visible = visible[: run_on.start()]
    for marker in reversed(list(_MARKERS.finditer(visible))):
        found = _first_number(marker["box"] if marker["box"] is not None else visible[marker.end():])
        if found is not None:
            return found
    return _fallback(visible)


def value(text: str) -> Fraction | None:
    """A written number as an exact value: `$1,000`, `72.00`, `.5`, `3/4`, `1.5 million`, `-10`."""
    match = _NUMBER.search(_clean(text))
    return _number(match) if match else None


def gold(answer: str) -> Fraction:
    """The gold value of a GSM8K answer (after its last `####`)."""
    found = value(answer.rpartition("####")[2])
    if found is None:
        raise ValueError(f"no number after '####' in {answer[-80:]!r}")
    return found


def score(text: str, answer: str) -> tuple[bool, str | None]:
    """(right, what was read) of a completion against a gold answer."""
    found = extract(text)
    return (found is not None and value(found) == gold(answer)), found
