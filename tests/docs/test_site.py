"""The site: strict build, links, and pages that the navigation knows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.commands import ROOT, pages

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[\w-]+)?\)|!\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in (a or b for a, b in LINK.findall(text)):
        if not re.match(r"^(https?:|mailto:)", target):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_navigation_names_pages_that_exist() -> None:
    text = re.sub(r"!!python\S*", "", (ROOT / "mkdocs.yml").read_text())

    def files(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [f for x in (node.values() if isinstance(node, dict) else node) for f in files(x)]  # type: ignore

    named = files(yaml.safe_load(text)["nav"])
    assert [f for f in named if not (ROOT / "docs" / f).is_file()] == []
    for needed in ("quickstart.md", "kernel-pr.md", "checkpoint.md", "report.md", "statistics.md", "variants.md",
                   "faults.md", "http.md", "engines.md", "docker.md", "ci.md", "faq.md"):
        assert needed in named


def test_strict_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed (pip install 'moe-parity[docs]')")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")], cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    html = (tmp_path / "site" / "index.html").read_text()
    assert "fonts.googleapis" not in html  # nothing is fetched from elsewhere
