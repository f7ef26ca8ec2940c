"""The HTML report: escaped and self-contained as text, and alive in headless Chromium when that is installed.

`MOE_PARITY_WRITE_IMAGES=1` also rewrites docs/img/report.png from a made-up example run.
"""

from __future__ import annotations

import io
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evals.records import ArmResult, ItemResult, item_id, sha256_hex
from evals.report import html
from evals.report.model import build
from evals.report.plot import axis, interval_plot
from evals.run_judge import Judged, assemble
from evals.wording import points
from tests.evals.browser import CHROMIUM, page
from tests.evals.judging import FINGERPRINT, IMAGES, judged, meta, protocol
from tests.evals.test_report import nasty, several

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
VOID = {"meta", "link", "br", "img"}


def example(n: int = 1319, seed: int = 5) -> Judged:
    """A made-up run with readable texts, tokens and logprob gaps: 1268 → 1262 right, 19 worse, 13 better."""
    rng = random.Random(seed)

    def answer(index: int, right: bool, arm: str) -> ItemResult:
        local = random.Random(f"{index}{'' if right else arm}")
        x, y, z = (random.Random(f"{index}{k}").randint(3, 60) for k in "xyz")
        total = x * y + z
        said = total if right else total + local.choice((1, -1, 10, -10))
        first = f"Each of the {x} crates holds {y} pears, so there are {x}*{y}=<<{x}*{y}={x * y}>>{x * y} pears.\n"
        text = f"{first}With the {z} loose ones that is {x * y}+{z}=<<{x * y}+{z}={said}>>{said}.\n#### {said}"
        tokens = re.findall(r" ?[A-Za-z]+|\d|\s|[^\w\s]+", text)
        question = (
            f"A stall has {x} crates of {y} pears each and {z} loose pears. How many pears are there (no. {index})?"
        )
        return ItemResult(
            item_id(question), index, question, f"#### {total}", sha256_hex(question), "completed", text, "stop", 61,
            len(tokens), 0.2, right, right, right, difficulty=str(2 + index % 4), tokens=tokens,
            gaps=[round(local.expovariate(1.2), 3) for _ in tokens], extracted=str(said),
        )  # fmt: skip

    def run(name: str, wrong: set[int], variant: str) -> ArmResult:
        print_ = {
            **FINGERPRINT,
            "variant": {"requested": variant, "fallbacks": 0, "resolved": {str(i): variant for i in range(1, 6)}},
        }
        results = [answer(i, i not in wrong, name) for i in range(n)]
        return ArmResult(name, variant, print_, print_, {r.item: r for r in results})

    wrong = set(rng.sample(range(n), 51))
    right = sorted(set(range(n)) - wrong)
    other = (wrong - set(rng.sample(sorted(wrong), 13))) | set(rng.sample(right, 19))
    again = (wrong - set(rng.sample(sorted(wrong), 11))) | set(rng.sample(right, 12))
    before, after = "fp8/emulated:bias=bf16", "fp8/emulated"
    runs = [run("baseline", wrong, before), run("candidate", other, after), run("baseline_repeat", again, before)]
    return assemble(meta(model="example (made up)"), protocol(n), None, runs, [])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def example_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("html") / "report.html"
    path.write_text(html.render(build(example())), encoding="utf-8")
    return path


class Checker(HTMLParser):
    """Balanced tags, unique ids, and every URL a page would ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.urls: list[str] = []
        self.scripts = 0
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action"):
                self.urls.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag, tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.stack
    return checker


def test_page_is_whole_and_self_contained(example_page: Path) -> None:
    text = example_page.read_text(encoding="utf-8")
    seen = checked(text)
    assert len(seen.ids) == len(set(seen.ids))
    assert all(u.startswith(("#", "data:")) for u in seen.urls)
    assert "http://" not in text and "https://" not in text
    assert seen.scripts == 1 and not seen.handlers
    assert "default-src 'none'" in text and len(text) < 400_000


def test_verdict_comes_first_and_numbers_are_there(example_page: Path) -> None:
    text = example_page.read_text(encoding="utf-8")
    order = [
        text.index(x)
        for x in (
            "<h1>PASS</h1>",
            "Difference against the margin",
            "<h2>Numbers</h2>",
            "<h2>Gates</h2>",
            "<h2>Answers that changed</h2>",
            "How this was run",
        )
    ]
    assert order == sorted(order)
    assert "1268/1319" in text and "1262/1319" in text and "19 worse / 13 better" in text
    assert text.count("<mark>") == 64  # both sides of 32 flips
    assert "fp8/emulated on 5/5 layers, 0 fallbacks" in text and "also flips in A/A" in text
    assert "gap baseline" in text and "By difficulty" in text


def test_untrusted_text_is_escaped() -> None:
    text = html.render(build(nasty()))
    seen = checked(text)
    assert seen.scripts == 1 and not seen.handlers
    assert "alert(1)" in text and "<script>alert" not in text
    assert not any("javascript:" in u for u in seen.urls)


@pytest.mark.parametrize(
    "run",
    [
        lambda: judged((1100, 168, 13, 38)),
        lambda: judged((180, 5, 3, 12), None),
        lambda: judged((1268, 0, 0, 51), (0, 0)),
        lambda: judged((4, 0, 0, 0), None, cand={"statuses": dict.fromkeys(range(4), "error")}),
        several,
    ],
)
def test_all_states_make_whole_pages(run: object) -> None:
    made = build(run())  # type: ignore[operator]
    text = html.render(made)
    seen = checked(text)
    assert len(seen.ids) == len(set(seen.ids))
    assert f"<h1>{made['state']}</h1>" in text


def test_plot_places_values_on_its_axis() -> None:
    made = build(judged((1249, 19, 13, 38)))
    svg = interval_plot(made["comparisons"], 1.5, 0.005)
    low, high, step = axis([-1.5, 0.0, -1.2, 0.41, -1.36])
    assert low <= -1.5 and high >= 0.41 and (high - low) / step <= 12
    margin = float(re.search(r'class="margin" x1="([\d.]+)"', svg)[1])  # type: ignore[index]
    bound = float(re.search(r'class="cap" x1="([\d.]+)"', svg)[1])  # type: ignore[index]
    zero = float(re.search(r'class="zero" x1="([\d.]+)"', svg)[1])  # type: ignore[index]
    dot = float(re.search(r'class="dot" cx="([\d.]+)"', svg)[1])  # type: ignore[index]
    assert margin < bound < dot < zero
    per_point = (zero - margin) / 1.5
    assert (dot - margin) / per_point == pytest.approx(1.5 - 0.4549, abs=0.01)
    assert interval_plot([], 1.5, None) == ""
    assert [points(x, d) for x, d in ((0.0, 0), (-0.00001, 2), (-0.0045, 2), (0.1, 0))] == ["0", "0.00", "−0.45", "+10"]


@needs_browser
async def test_in_chromium(example_page: Path, tmp_path: Path) -> None:
    """No console output, no request but the file, filters, copy button, keyboard, phone width, dark mode."""
    async with page() as tab:
        await tab.size(1100, 1400)
        await tab.dark(False)
        await tab.open(example_page)
        assert await tab.js("document.documentElement.classList.contains('js')")  # the hash in the CSP fits the script
        visible = "[...document.querySelectorAll('.item')].filter(x => !x.hidden).length"
        assert await tab.js(visible) == 32
        await tab.js("document.querySelector('button[data-kind=worse]').click()")
        assert await tab.js(visible) == 19
        assert await tab.js("document.querySelector('button[data-kind=worse]').getAttribute('aria-pressed')") == "true"
        assert await tab.js("document.querySelector('.bar [role=status]').textContent") == "19 shown"
        await tab.js("document.querySelector('button[data-kind=all]').click()")
        await tab.js("document.querySelector('[data-toggle]').click()")
        assert await tab.js("document.querySelectorAll('.item[open]').length") == 32
        await tab.js("document.querySelector('[data-toggle]').click()")
        # keyboard: the first stop is the skip link; a focused summary opens with Enter
        await tab.js("document.activeElement.blur(); window.scrollTo(0, 0)")
        await tab.key("Tab", 9)
        assert await tab.js("document.activeElement.className") == "skip"
        await tab.js("document.querySelector('.item summary').focus()")
        await tab.key("Enter", 13)
        assert await tab.js("document.querySelectorAll('.item[open]').length") == 1
        await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        await tab.js("document.querySelector('[data-copy]').click()")
        label = ""
        for _ in range(50):
            label = await tab.js("document.querySelector('[data-copy]').textContent")
            if label != "Copy":
                break
            await tab.js("new Promise(done => setTimeout(done, 20))")
        assert label in ("Copied", "Select and copy")
        await tab.js("document.activeElement.blur(); window.scrollTo(0, 0)")
        light = await tab.shot()
        await tab.dark(True)
        background = await tab.js("getComputedStyle(document.body).backgroundColor")
        assert max(int(x) for x in re.findall(r"\d+", background)[:3]) < 60
        dark = await tab.shot()
        assert light != dark
        for width in (360, 768, 1100):
            await tab.size(width, 900, phone=width < 500)
            assert await tab.js("document.documentElement.scrollWidth") <= width
        await tab.size(390, 1400, phone=True)
        await tab.js("window.scrollTo(0, 0)")
        phone = await tab.shot()
        assert tab.problems == []
        assert {u for u in tab.requests if not u.startswith("data:")} == {example_page.resolve().as_uri()}
    if os.environ.get("MOE_PARITY_WRITE_IMAGES"):
        write_images(light, phone)
    assert len(light) > 20_000


@needs_browser
async def test_hostile_texts_in_chromium(tmp_path: Path) -> None:
    path = tmp_path / "nasty.html"
    run = nasty()
    path.write_text(html.render(build(run)), encoding="utf-8")
    async with page() as tab:
        await tab.open(path)
        assert await tab.js("document.scripts.length") == 1
        assert await tab.js("document.querySelectorAll('pre b, pre script, .item i').length") == 0
        assert tab.problems == []


def write_images(desktop: bytes, phone: bytes) -> None:
    """Desktop (light) and phone (dark) side by side as one small palette PNG."""
    from PIL import Image

    left, right = (Image.open(io.BytesIO(x)).convert("RGB") for x in (desktop, phone))
    canvas = Image.new("RGB", (left.width + right.width + 24, left.height), (255, 255, 255))
    canvas.paste(left, (0, 0))
    canvas.paste(right, (left.width + 24, 0))
    canvas = canvas.resize((round(canvas.width * 0.72), round(canvas.height * 0.72)), Image.Resampling.LANCZOS)
    IMAGES.mkdir(parents=True, exist_ok=True)
    canvas.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        IMAGES / "report.png", optimize=True
    )


def test_example_is_marked_as_made_up(example_page: Path) -> None:
    assert "example (made up)" in example_page.read_text(encoding="utf-8")
