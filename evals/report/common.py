"""Small pieces shared by the renderings: numbers in words, what the server says it ran, one-line texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evals.wording import p_value, percent, points

Report = Mapping[str, Any]

STATE_MEANING = {
    "PASS": "non-inferior",
    "FAIL": "regression shown",
    "INCONCLUSIVE": "not decided",
    "INVALID": "not a valid comparison",
    "CHANGED": "accuracy non-inferior, but the answers changed",
}
GATE_MARK = {"pass": "✔", "fail": "✘", "changed": "≠", "inconclusive": "?", "invalid": "!", "skipped": "–"}


def score_cell(share: Mapping[str, Any] | None) -> str:
    """ "1268/1319 (96.13 %, 94.95–97.05)": counts, share and Wilson interval."""
    if share is None:
        return "–"
    return (
        f"{share['right']}/{share['n']} ({percent(share['share'])}, {share['low'] * 100:.2f}–{share['high'] * 100:.2f})"
    )


def arm(report: Report, name: str) -> Mapping[str, Any]:
    """The entry of an arm by name."""
    return next(a for a in report["arms"] if a["name"] == name)


def backend(entry: Mapping[str, Any], report: Report | None = None) -> str:
    """ "fp8/trtllm on 46/46 layers, 0 fallbacks", what an engine's routes and log say, or that nothing attests it."""
    server = entry["server"]
    if server is None:
        for finding in (report or {}).get("integrity", {}).get("findings", ()):
            if finding["code"] == "kernel-attested" and finding["arm"] == entry["name"]:
                return str(finding["message"].partition(": ")[2])
        return "not attested (the server has no /fingerprint)"
    resolved = server.get("resolved") or {}
    total = sum(resolved.values())
    names = ", ".join(f"{name} on {count}/{total} layers" for name, count in resolved.items()) or "no layer named"
    fallbacks = server.get("fallbacks")
    return f"{names}, {'?' if fallbacks is None else fallbacks} fallbacks"


def interval(low: float, high: float, digits: int = 2) -> str:
    """A difference's interval in points."""
    return f"[{points(low, digits)}, {points(high, digits)}]"


def ratio_cell(ratio: Mapping[str, Any] | None) -> str:
    """ "0.997 (95 % 0.990–1.004)"."""
    if ratio is None:
        return "–"
    return f"{ratio['estimate']:.3f} (95 % {ratio['low']:.3f}–{ratio['high']:.3f})"


def floor_words(report: Report) -> str:
    """The A/A floor in one phrase."""
    floor = report["floor"]
    if floor is None:
        return "no A/A run"
    texts = "" if floor["texts_differ"] is None else f", {floor['texts_differ']}/{floor['n']} texts differ"
    return (
        f"A/A flips {floor['flips']}/{floor['n']} ({percent(floor['discordance'])}{texts}), "
        f"noise {floor['noise'] * 100:.2f} pt ({floor['source']})"
    )


def flips_words(numbers: Mapping[str, Any]) -> str:
    """ "19 worse / 13 better (2.4 %)"."""
    table = numbers["table"]
    share = (table["b"] + table["c"]) / table["n"] if table["n"] else 0.0
    return f"{table['b']} worse / {table['c']} better ({percent(share, 1)})"


def difference_words(numbers: Mapping[str, Any], margin: float) -> str:
    """The sentence of the gate: difference, one-sided bound, margin and whether it holds."""
    mark = "✔" if numbers["noninferior"] else "✘"
    sign = ">" if numbers["noninferior"] else "≤"
    return (
        f"Δ {points(numbers['difference'])} pt, {percent(1 - numbers['level'], 1)} one-sided lower "
        f"{points(numbers['lower'])} (Tango) {sign} −{margin:.2f} {mark}"
    )


def regression_words(numbers: Mapping[str, Any]) -> str:
    """The regression p, with Holm's adjustment where several candidates were judged."""
    text = f"regression {p_value(numbers['p_worse'])} (McNemar mid-p)"
    if numbers["design_effect"] != 1:
        text = f"regression {p_value(numbers['p_worse'])} (score test, design effect {numbers['design_effect']:.2f})"
    if numbers["p_worse_adjusted"] is not None:
        text += f", Holm-adjusted {p_value(numbers['p_worse_adjusted'])}"
    if numbers["p_better"] < numbers["level"]:
        text += f" · improvement shown, {p_value(numbers['p_better'])}"
    return text


def short(value: Any, length: int = 8) -> str:
    """The beginning of a hash."""
    text = str(value or "?")
    return text if len(text) <= length + 1 else text[:length] + "…"


def one_line(text: str, limit: int = 120) -> str:
    """A text on one line, its middle cut when it is long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit // 2 - 2]} … {flat[-(limit // 2 - 1) :]}"


def versions(entry: Mapping[str, Any]) -> str:
    """Engine versions an arm's server reported, "torch 2.13.0, transformers 5.24.0"."""
    server = entry["server"] or {}
    known = {k: v for k, v in (server.get("versions") or {}).items() if v}
    return ", ".join(f"{k} {v}" for k, v in known.items()) or "engine versions not reported"
