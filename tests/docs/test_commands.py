"""Every command in README and docs is executed, or, where it needs a GPU, a network or minutes, at least parsed.

RULES is the one table of what is done with which command and why. A line that no rule knows and no parser takes fails.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.docs.commands import ROOT, Command, commands


@dataclass(frozen=True)
class Rule:
    """What to do with commands that match `pattern`; `more` is appended, `drop` options are removed first."""

    pattern: str
    how: str  # run (here and now), slow (run, minutes), parse
    why: str
    more: Sequence[str] = ()
    codes: Sequence[int] = (0,)


FEW = ("--limit", "12", "--no-aa", "--smoke", "4", "--quiet", "--margin", "30")
RULES = (
    Rule(r"^evals plan", "run", "a second"),
    Rule(r"^moe-kernels list", "run", "a second"),
    Rule(r"--dry-run$", "run", "starts nothing", codes=(0,)),
    Rule(r"^evals report ", "slow", "needs a run folder: it is made with few items first", codes=(0, 1, 3, 4, 5)),
    Rule(r"^evals run gsm8k-mini ", "slow", "12 items instead of all", FEW, codes=(0, 1, 3, 5)),
    Rule(r"^evals run all --model mini", "slow", "12 items; routing moves: CHANGED", FEW, codes=(0, 1, 3, 5)),
    Rule(r"^evals run logprobs --model mini", "slow", "4 items as written", codes=(0, 3, 5)),
    Rule(r"^moe-kernels check \S+ --model mini", "slow", "few tokens", ("--tokens", "3"), codes=(0,)),
    Rule(r"run\.sh$", "slow", "the plain CI script, 12 items", codes=(0, 1, 3, 5)),
    Rule(r"^make docs", "slow", "builds the site"),
    Rule(r"^evals selftest", "parse", "minutes of faults: tests/evals/test_selftest.py and `make test-slow` run it"),
    Rule(r"^service plan ", "run", "a second: reads a config"),
    Rule(r"^service ", "parse", "serves until stopped: tests/service start it with the same options"),
    Rule(r"^(evals|moe-kernels) ", "parse", "needs a checkpoint, a GPU or servers that are not here"),
    Rule(r"^make ", "parse", "sets up an environment of its own, as .ci/run does: the target exists"),
    Rule(r"^python3? ", "parse", "a benchmark or a slow test on its own machine: the file exists and is Python"),
    Rule(r"^docker ", "parse", "needs an engine: files, profiles and services exist; `make test-docker` runs them"),
    Rule(r"^bash ", "parse", "the script exists and its syntax is right"),
    Rule(r"^curl ", "parse", "needs a running service: the route exists in it"),
)
ALL = commands()
IDS = [re.sub(r"[^\w.=/-]+", "_", f"{c.page.removeprefix('docs/')}:{c.line}")[:90] for c in ALL]


def rule(command: Command) -> Rule:
    """The first rule that knows a command."""
    line = " ".join(command.words)
    for one in RULES:
        if re.search(one.pattern, line):
            return one
    pytest.fail(f"{command.page}: no rule says how to execute '{command.line}'; add one to tests/docs/test_commands.py")


def of(how: str) -> list[object]:
    first = {c.line: (c, i) for c, i in reversed(list(zip(ALL, IDS, strict=True)))}  # a line of two pages runs once
    return [pytest.param(c, id=i) for c, i in zip(ALL, IDS, strict=True)
            if rule(c).how == how and first[c.line][0] is c]


def execute(command: Command, folder: Path, more: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run it in `folder` with the repository's packages, docs' placeholders replaced by what is here."""
    words = [w.replace("docker/variants", str(ROOT / "docker" / "variants")).replace(
        ".github/actions", str(ROOT / ".github" / "actions")).replace(
        "benchmarks/configs", str(ROOT / "benchmarks" / "configs")) for w in command.words]
    bin_dir = Path(sys.executable).parent
    env = os.environ | command.env | {"PATH": f"{bin_dir}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run([*words, *more], cwd=folder, env=env, capture_output=True, text=True, timeout=900,
                          check=False)


def test_there_are_commands_and_every_one_has_a_rule() -> None:
    assert len(ALL) > 30
    for command in ALL:
        assert rule(command).why


@pytest.mark.parametrize("command", of("run"))
def test_run(command: Command, tmp_path: Path) -> None:
    done = execute(command, tmp_path)
    assert done.returncode in rule(command).codes, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", of("parse"))
def test_parse(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command.words
    if words[0] == "evals":
        from evals.cli import COMMANDS, build_parser

        assert words[1] in COMMANDS or words[1].startswith("-")
        build_parser(words[1]).parse_args(words[1:])
    elif words[0] == "service":
        from service.__main__ import parser
        from service.bench.cli import parser as bench

        if words[1] == "bench":
            bench().parse_args(words[2:])
        else:
            parser().parse_args(words[1:])
    elif words[0] == "moe-kernels":
        from moe_kernels.cli import build_parser as kernels

        kernels().parse_args(words[1:])
    elif words[0] == "make":
        text = (ROOT / "Makefile").read_text()
        for target in (w for w in words[1:] if "=" not in w and not w.startswith("-")):
            assert re.search(rf"^{re.escape(target)}:", text, re.MULTILINE), target
    elif words[0] in ("python", "python3"):
        python_file(words[1:])
    elif words[0] == "docker":
        docker(words[1:])
    elif words[0] == "bash":
        assert (ROOT / words[1]).is_file() or words[1].startswith("-")
        subprocess.run(["bash", "-n", str(ROOT / words[1])], check=True)
    elif words[0] == "curl":
        route = re.search(r"https?://[^/]+(/[\w/]+)", " ".join(words))
        assert route and f'"{route[1]}"' in "".join(p.read_text() for p in (ROOT / "service").rglob("*.py"))


def python_file(words: list[str]) -> None:
    """`python FILE …` or `python -m MODULE …`: it is there, and its own options are known to its source."""
    if words[0] == "-m":
        import importlib.util

        assert importlib.util.find_spec(words[1]), words[1]
        for path in (w for w in words[2:] if w.startswith("tests/")):
            assert (ROOT / path.split("::")[0]).exists(), path
        return
    if words[0].startswith("-"):
        return
    source = (ROOT / words[0]).read_text()
    ast.parse(source)
    helpers = "".join(p.read_text() for p in (ROOT / words[0]).parent.glob("*.py"))
    for option in (w.split("=")[0] for w in words[1:] if w.startswith("--")):
        assert f'"{option}"' in source or f'"{option}"' in helpers, f"{words[0]} has no {option}"


def docker(words: list[str]) -> None:
    """Compose files, profiles, services and Dockerfile targets that a command names exist."""
    files = [ROOT / words[i + 1] for i, w in enumerate(words) if w in ("-f", "--file")]
    for file in files:
        assert file.is_file(), file
    if words[0] == "build":
        target = words[words.index("--target") + 1]
        assert f" AS {target}\n" in (ROOT / "docker/Dockerfile").read_text()
        return
    if words[0] != "compose":
        return
    services: dict[str, dict[str, object]] = {}
    for file in files:
        services |= yaml.safe_load(file.read_text()).get("services", {})
    profiles = {p for s in services.values() for p in s.get("profiles", [])}  # type: ignore[attr-defined]
    for i, word in enumerate(words):
        if word == "--profile":
            assert words[i + 1] in profiles, words[i + 1]
        if word in ("--exit-code-from", "wait", "logs"):
            assert words[i + 1] in services, words[i + 1]
    if "run" in words:
        name = next(w for w in words[words.index("run") + 1:] if not w.startswith("-"))
        assert name in services, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the slow commands run, in the pages' order: a run is there before its report is asked for."""
    return tmp_path_factory.mktemp("docs")


@pytest.mark.slow
@pytest.mark.parametrize("command", of("slow"))
def test_run_slow(command: Command, folder: Path) -> None:
    done_by = rule(command)
    if command.words[:2] == ["evals", "report"]:
        target = folder / command.words[2]
        if not target.exists():
            made = Command(command.page, f"evals run gsm8k-mini --model mini --baseline fp8/emulated:bias=bf16 "
                                         f"--candidate fp8/emulated --out {command.words[2]}")
            execute(made, folder, FEW)
    if command.words[0] == "make":
        pytest.importorskip("mkdocs", reason="mkdocs-material is not installed (pip install 'moe-parity[docs]')")
        done = subprocess.run(["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / "site")], cwd=ROOT,
                              env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
                              capture_output=True, text=True, check=False)
    else:
        out = command.words[command.words.index("--out") + 1] if "--out" in command.words else None
        if out:
            shutil.rmtree(folder / out, ignore_errors=True)
        env_limit = Command(command.page, re.sub(r"\bLIMIT=\d+", "LIMIT=12 ARGS='--no-aa --smoke 4'", command.line))
        done = execute(env_limit if "LIMIT=" in command.line else command, folder, done_by.more)
    assert done.returncode in done_by.codes, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
