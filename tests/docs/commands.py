"""Finds every command in README and docs, and says how each is executed by a test."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELL = {"", "sh", "bash", "console", "shell"}
# programs whose lines are commands; a block without a language may also be a listing or a synopsis
PROGRAMS = {"make", "evals", "service", "moe-kernels", "python", "python3", "docker", "curl", "bash", "kubectl", "pip",
            "uv", "git", "salloc", "lm_eval", "nohup", "hadolint", "mkdocs"}
_SYNOPSIS = re.compile(r"…|\[--|\||\bVARIANT\b|\bCKPT\b|<\w+")


@dataclass(frozen=True)
class Command:
    """One command line of a page."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """Without leading assignments."""
        words = shlex.split(self.line, comments=True)
        while words and re.match(r"^\w+=", words[0]):
            words = words[1:]
        return words

    @property
    def env(self) -> dict[str, str]:
        """Leading assignments."""
        out = {}
        for word in shlex.split(self.line, comments=True):
            if not re.match(r"^\w+=", word):
                break
            name, _, value = word.partition("=")
            out[name] = value
        return out


def pages() -> list[Path]:
    """README and every page of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[Command]:
    """Every command in a shell block, each once a page."""
    found: list[Command] = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
            if match[2] not in SHELL:
                continue
            for line in match[3].replace("\\\n", " ").splitlines():
                line = " ".join(line.strip().removeprefix("$ ").split())
                if not line or line.startswith("#"):
                    continue
                command = Command(name, line)
                try:
                    words = command.words
                except ValueError:  # an unbalanced quote: prose
                    words = []
                if match[2] == "" and (not words or words[0] not in PROGRAMS or _SYNOPSIS.search(line)):
                    continue  # a listing, output, or a synopsis with placeholders
                found.append(command)
    return list(dict.fromkeys(found))
