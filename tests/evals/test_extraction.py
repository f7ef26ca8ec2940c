"""Our extractor, and lm-eval's two filters as they are, on the table of evals.md §1.4."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.extraction import extract, gold, score, strip_reasoning, value

# text, gold, strict, flexible (both as lm-eval 0.4.13 scores them), ours
TABLE = [
    ("#### 72", "72", 1, 1, 1),
    ("#### 1,000", "1000", 1, 1, 1),
    ("#### 1000", "1,000", 1, 1, 1),
    ("#### -10", "-10", 1, 1, 1),
    ("#### $72", "72", 0, 1, 1),
    ("####72", "72", 0, 1, 1),
    ("#### **72**", "72", 0, 1, 1),
    (r"so \boxed{72}", "72", 0, 1, 1),
    ("#### 72.00", "72", 0, 0, 1),
    ("It costs 8*9 = $72...", "72", 0, 0, 1),
    ("So she has 72 apples (i.e. 6 dozen)", "72", 0, 0, 1),
    ("#### 72\n\nQuestion 2: 9 cats", "72", 1, 0, 1),
    ("#### 18\n#### 20", "18", 1, 0, 0),
    ("#### 18\n#### 20", "20", 0, 1, 1),
    ("#### .5", "0.5", 0, 0, 1),
    ("x = 3/4", "0.75", 0, 0, 1),
    ("That is 1.5 million", "1500000", 0, 0, 1),
    ("**Final Answer:** 72\n1. check 2. done...", "72", 0, 0, 1),
    ("<think>we get 7 so far and then 4", "7", 0, 0, 0),
    ("", "72", 0, 0, 0),
]


@pytest.mark.parametrize(("text", "answer", "strict", "flexible", "ours"), TABLE)
def test_table_ours(text: str, answer: str, strict: int, flexible: int, ours: int) -> None:
    assert score(text, f"because\n#### {answer}")[0] is bool(ours)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>#### 9</think>\n#### 72", "72"),
        ("#### 9</think>The answer is 72.", "72"),
        ("The answer is $1,234.50.", "$1,234.50"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{\$72}", "$72"),
        (r"\boxed{72\text{ apples}}", "72"),
        ("#### 12 + 6 = 18", "18"),
        ("####\n72", "72"),
        ("#### -$10", "-$10"),
        ("#### \u221210", "\u221210"),
        ("Answer: 5 apples and 3 pears", "5"),
        ("She earns **$18** each day (9 eggs, $2 each).", "$18"),
        ("Identify the Question: how many? 3 + 4 = 7\n#### 7", "7"),
        ("no digits here", None),
        ("#### none, but 4 remain", "4"),
        ("<think>a</think><think>#### 4", None),
    ],
)
def test_more_forms(text: str, found: str | None) -> None:
    assert extract(text) == found


def test_values_are_exact() -> None:
    assert value("$1,000.50") == Fraction(2001, 2)
    assert value("1/3") == Fraction(1, 3)
    assert value("1/0") is None
    assert value("2.5 thousand") == 2500
    assert value("-$3") == value("$-3") == value("\u22123") == -3
    assert gold("a <<1+1=2>>2\n#### -1,234") == -1234
    with pytest.raises(ValueError, match="no number"):
        gold("#### none")


def test_unclosed_reasoning_is_none() -> None:
    assert strip_reasoning("a <think> b") is None
    assert strip_reasoning("<think>b</think>c") == "c"
    assert strip_reasoning("plain") == "plain"


FORMS = ["#### {}", "#### ${}", "\\boxed{{{}}}", "The answer is {}.", "**Final Answer:** {}",
         "<think>#### 1</think>so\n#### {}"]


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=2), st.sampled_from(FORMS), st.booleans())
def test_every_written_number_is_read_back(number, form, commas) -> None:
    written = f"{number:,}" if commas else f"{number}"
    assert value(extract(form.format(written)) or "") == Fraction(number)


@given(st.text())
def test_never_raises(text: str) -> None:
    found = extract(text)
    assert found is None or value(found) is not None or "/" in found
