"""The generator: deterministic, right, disjoint splits, and the format it promises, by the independent parser."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.mini import dataset
from evals.mini.draft import money, prose
from evals.mini.generator import FAMILIES, MAX_STEPS, MIN_STEPS, Problem, draw, is_held_out, training_shard
from evals.mini.rng import Rng
from evals.mini.steps import StepError, check, evaluate, prose_value
from evals.mini.words import NAMES

TRAINING = 6000
NUMBER_WORDS = {
    "twice": 2,
    "half": 2,
    "doubles": 2,
    "triples": 3,
    "third": 3,
    "three": 3,
    "quarter": 4,
    "four": 4,
    "five": 5,
}
UNIT_SIZES = {"centimeters": 100, "inches": 12, "minutes": 60, "seconds": 60, "days": 7, "hours": 24, "meters": 1000}


@pytest.fixture(scope="module")
def training() -> list[Problem]:
    return list(training_shard(11, 3, TRAINING))


@pytest.fixture(scope="module")
def evaluation() -> list[dict]:
    return dataset.load()


def test_evaluation_set_is_the_pinned_one(evaluation: list[dict]) -> None:
    """The set is data: a change of the generator that moves it must change this hash knowingly."""
    assert len(evaluation) == 1319
    assert dataset.sha256(evaluation) == "617fafb13f0535aa87d46007ed48f8d5e5c1411fe0eb9f4666e343c9261dba0b"
    text = "\n".join(json.dumps([r["question"], r["answer"]], ensure_ascii=False) for r in evaluation)
    assert hashlib.sha256(text.encode()).hexdigest() == dataset.sha256(evaluation)


def test_same_in_another_process_and_hash_seed() -> None:
    code = "from evals.mini import dataset; print(dataset.sha256(dataset.load(50)))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {dataset.sha256(dataset.load(50))}


def test_shards_and_seeds_differ() -> None:
    first = [p.question for p in training_shard(1, 0, 50)]
    assert first == [p.question for p in training_shard(1, 0, 50)]
    assert not set(first) & {p.question for p in training_shard(1, 1, 50)}
    assert not set(first) & {p.question for p in training_shard(2, 0, 50)}


def test_every_training_item_is_right(training: list[Problem]) -> None:
    for problem in training:
        checked = check(problem.answer)
        assert checked.steps == problem.difficulty
        assert MIN_STEPS <= checked.steps <= MAX_STEPS


def test_every_evaluation_item_is_right(evaluation: list[dict]) -> None:
    for row in evaluation:
        assert check(row["answer"]).steps == row["difficulty"]


def test_operands_come_from_the_question_or_from_earlier_steps(training: list[Problem]) -> None:
    """Nothing is conjured up: each number in a step is in the question, a number word or unit of it, or a result."""
    for problem in training[:3000]:
        known = {prose_value(n) for n in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", problem.question.replace("%", ""))}
        known |= {Fraction(n) for n in re.findall(r"\d+", problem.question)}
        words = set(re.findall(r"[a-z]+", problem.question.lower()))
        known |= {Fraction(v) for w, v in NUMBER_WORDS.items() if w in words}
        known |= {Fraction(v) for w, v in UNIT_SIZES.items() if w in words} | {Fraction(100)}
        if "one" in words:
            known.add(Fraction(1))
        for expression in check(problem.answer).expressions:
            for number in re.findall(r"\d+(?:\.\d+)?", expression):
                assert Fraction(number) in known, (number, problem)
            known.add(abs(evaluate(expression)))


def _solve_relations(question: str) -> int:
    """A solver for the relations family that knows its sentences but shares no code with the generator."""
    parts = {"half": 2, "a third": 3, "a quarter": 4}
    times = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}
    *facts, asked = re.split(r"(?<=[.?])\s", question)
    rules, known = [], {}
    for fact in facts:
        if m := re.fullmatch(r"(\w+) has (\d+) (\w+)\.", fact):
            known[m[1]] = int(m[2])
        elif m := re.fullmatch(r"(\w+) has as many \w+ as (\w+) and (\w+) together\.", fact):
            rules.append((m[1], (m[2], m[3]), lambda a, b: a + b))
        elif m := re.fullmatch(r"(\w+) has (.+) as many \w+ as (\w+)\.", fact):
            if m[2] in times:
                rules.append((m[1], (m[3],), lambda a, k=times[m[2]]: a * k))
            else:
                rules.append((m[1], (m[3],), lambda a, k=parts[m[2]]: a // k if a % k == 0 else None))
        else:
            m = re.fullmatch(r"(\w+) has (\d+) (?:\w+ )?(more|fewer) (?:\w+ )?than (\w+)(?: has)?\.", fact)
            assert m, fact
            d = int(m[2]) if m[3] == "more" else -int(m[2])
            rules.append((m[1], (m[4],), lambda a, d=d: a + d))
    for _ in rules:
        for who, needs, rule in rules:
            if who not in known and all(n in known for n in needs):
                known[who] = rule(*(known[n] for n in needs))
    if m := re.fullmatch(r"How many \w+ does (\w+) have\?", asked):
        return known[m[1]]
    if m := re.fullmatch(r"How many \w+ do (\w+) and (\w+) have together\?", asked):
        return known[m[1]] + known[m[2]]
    m = re.fullmatch(r"How many more \w+ does (\w+) have than (\w+)\?", asked)
    assert m, asked
    return known[m[1]] - known[m[2]]


def test_relations_answers_follow_from_their_questions(training: list[Problem]) -> None:
    found = [p for p in training if p.family == "relations"]
    assert len(found) > 1000
    for problem in found:
        assert _solve_relations(problem.question) == check(problem.answer).value, problem


def _walk(question: str) -> int:
    """A solver for the below_zero family without a comparison: the start, then every change in order."""
    first, *rest = re.split(r"(?<=[.?])\s", question)
    value = int(re.search(r"-?\d+", first)[0])  # type: ignore[index]
    for fact in rest:
        if m := re.search(r"(warmer|rises|pays in|is paid|colder|falls|takes out|taken off)", fact):
            d = int(re.search(r"\d+", fact)[0])  # type: ignore[index]
            value += d if m[1] in ("warmer", "rises", "pays in", "is paid") else -d
    return value


def test_below_zero_answers_follow_from_their_questions(training: list[Problem]) -> None:
    found = [
        p for p in training if p.family == "below_zero" and ("differ" not in p.question) and "short" not in p.question
    ]
    assert len(found) > 200
    negative = 0
    for problem in found:
        value = _walk(problem.question)
        assert value == check(problem.answer).value, problem
        negative += value < 0
    assert negative > 20


def test_splits_are_disjoint(training: list[Problem], evaluation: list[dict]) -> None:
    """By construction (a chain of arithmetic is in one split only) and by hash of the questions."""
    held_out = {"|".join(re.findall(r"<<(.*?)>>", r["answer"])) for r in evaluation}
    assert all(is_held_out(chain) for chain in held_out)
    assert not any(is_held_out(p.chain) for p in training)
    assert not held_out & {p.chain for p in training}
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()  # noqa: E731
    assert not {digest(r["question"]) for r in evaluation} & {digest(p.question) for p in training}
    assert len({r["question"] for r in evaluation}) == len(evaluation)


def test_about_one_chain_in_sixteen_is_held_out() -> None:
    chains = (f"{a}+{b}={a + b}|{a + b}*2={2 * (a + b)}" for a in range(70) for b in range(70))
    share = sum(map(is_held_out, chains)) / 4900
    assert 0.05 < share < 0.075


def test_variety(training: list[Problem]) -> None:
    """Every family and level, negatives, separators, decimals, distractors' traces: all of them occur often."""
    assert {p.family for p in training} == set(FAMILIES)
    assert {p.difficulty for p in training} == set(range(MIN_STEPS, MAX_STEPS + 1))
    finals = [p.answer.rsplit("#### ", 1)[1] for p in training]
    assert sum(f.startswith("-") for f in finals) > 60
    assert sum("," in f for f in finals) > 200
    assert sum("." in f for f in finals) > 100
    assert sum("%" in p.question for p in training) > 300
    assert sum("/" in p.question for p in training) > 300
    assert len({p.question for p in training}) > 0.998 * len(training)  # short problems can recur


def test_names_are_single_given_names(training: list[Problem]) -> None:
    """No full name can arise: a name is never followed by another capitalised word."""
    pattern = re.compile(r"\b(?:" + "|".join(NAMES) + r")\s+[A-Z][a-z]+")
    assert not any(pattern.search(p.question) for p in training)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_families_reach_all_their_lengths(family: str) -> None:
    for steps in range(3 if family == "comparison" else 2, MAX_STEPS + 1):
        problem = draw(Rng("test", family, steps), held_out=False, steps=steps, families=(family,))
        assert (problem.family, problem.difficulty) == (family, steps)


@given(st.integers(-(10**6), 10**6))
def test_prose_numbers_read_back(n: int) -> None:
    assert prose_value(prose(str(n))) == n
    assert prose_value(prose(money(n))) == Fraction(n, 100)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 50))
def test_evaluate_is_exact(a: int, b: int, c: int) -> None:
    assert evaluate(f"{a}+{b}*{c}") == a + b * c
    assert evaluate(f"({a}-{b})/{c}") == Fraction(a - b, c)
    assert evaluate(f"{a}-(-{b})") == a + b
    assert evaluate(f"{b}/{c}/{c}*0.5") == Fraction(b, c) / c / 2


@pytest.mark.parametrize("bad", ["1+", "2**3", "(1+2", "1/0", "4 + 4", "__import__('os')", "", "1.2.3", ")"])
def test_evaluate_refuses(bad: str) -> None:
    with pytest.raises(StepError):
        evaluate(bad)


GOOD = "Ann has 2*3=<<2*3=6>>6 nuts.\nAnn has 6*200=<<6*200=1200>>1,200 nuts.\n#### 1,200"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("=6>>6", "=7>>7"),  # arithmetic
        (">>6 ", ">>7 "),  # text disagrees with step
        ("1,200 nuts", "12,00 nuts"),  # separator in the wrong place
        ("#### 1,200", "#### 1,201"),  # final value
        ("#### 1,200", "1,200"),  # no final line
        ("Ann has 2*3=<<", "Ann has 2*4=<<"),  # text before the step
        ("<<2*3=6>>6 nuts.", "6 nuts."),  # a line without a step
    ],
)
def test_check_finds_planted_faults(old: str, new: str) -> None:
    assert check(GOOD).steps == 2
    assert old in GOOD
    with pytest.raises(StepError):
        check(GOOD.replace(old, new))
