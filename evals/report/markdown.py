"""report.json as the block a reviewer pastes into a pull request: at most 40 lines, flips folded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evals.report import common

MAX_LINES = 40
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~@])")


def escape(text: str) -> str:
    """Model output and names as inert Markdown: no markup, no HTML, no mentions, no table cells."""
    return (
        _SPECIAL.sub(r"\\\1", " ".join(text.split()))
        .replace("\\<", "&lt;")
        .replace("\\>", "&gt;")
        .replace("\\@", "@\u200b")
    )


def code(text: str, limit: int = 90) -> str:
    """Untrusted text as an inline code span that cannot be left."""
    flat = common.one_line(text, limit).replace("`", "ˋ").replace("|", "¦")
    return f"`{flat}`" if flat else "*(empty)*"


def render(report: common.Report) -> str:
    """The Markdown block. Several candidates share it; flips are listed while lines are left."""
    comparisons = report["comparisons"]
    blocks = [_block(report, c) for c in comparisons]
    if len(blocks) == 1:
        lines = blocks[0]
    else:
        lines = [f"## Accuracy check · {escape(report['model'] or report['task'])} · {report['state']}", ""]
        compact = sum(len(b) for b in blocks) + len(lines) > MAX_LINES - 4
        for comparison, block in zip(comparisons, blocks, strict=True):
            lines += [_compact(report, comparison)] if compact else [*block, ""]
    lines = lines[: MAX_LINES - 4]
    lines.append(_provenance(report))
    room = MAX_LINES - len(lines)
    lines += _flips(comparisons, room)
    return "\n".join(lines[:MAX_LINES]) + "\n"


def _title(report: common.Report, comparison: Mapping[str, Any]) -> str:
    state = comparison["state"]
    what = common.STATE_MEANING[state]
    if state == "PASS":
        what += f", margin {report['margin']:g} pt"
    return (
        f"{escape(report['model'] or report['task'])} · {escape(comparison['baseline_variant'])} → "
        f"{escape(comparison['variant'])} · **{state}** ({what})"
    )


def _block(report: common.Report, comparison: Mapping[str, Any]) -> list[str]:
    base, cand = common.arm(report, "baseline"), common.arm(report, comparison["name"])
    lines = [f"### Accuracy check · {_title(report, comparison)}", "", escape(comparison["headline"]), ""]
    lines += [
        "| | baseline | candidate |",
        "|---|---|---|",
        f"| correct | {common.score_cell(base['scores']['ours'])} | {common.score_cell(cand['scores']['ours'])} |",
        f"| lm-eval strict / flexible | {_pair(base)} | {_pair(cand)} |",
        f"| among completed | {common.score_cell(base['completed'])} | {common.score_cell(cand['completed'])} |",
        f"| empty / truncated / errors | {_ended(base)} | {_ended(cand)} |",
    ]
    numbers = comparison["numbers"]
    if numbers is not None:
        ratio = numbers["length"]
        tail = f" (ratio {common.ratio_cell(ratio)})" if ratio else ""
        lines.append(f"| mean completion tokens | {_tokens(base)} | {_tokens(cand)}{tail} |")
        lines += [
            "",
            f"{common.difference_words(numbers, report['margin'])} · flips {common.flips_words(numbers)} · "
            f"{common.floor_words(report)}  ",
            f"{common.regression_words(numbers)} · recovery {common.ratio_cell(numbers['recovery'])}  ",
        ]
    else:
        lines.append("")
    for reason in comparison["reasons"][1:3]:
        lines.append(f"- {escape(reason['message'])}")
    for line in comparison["advice"][:3]:
        lines.append(f"- → {escape(line)}")
    for line in comparison["warnings"][:3]:
        lines.append(f"- ⚠ {escape(line)}")
    for layer in comparison["layers"][:5]:
        moved = "moved" if layer["moved"] else "unmoved"
        lines.append(f"- layer {escape(layer['layer'])} {moved}: {escape(layer['detail'])}")
    if lines[-1].startswith("- "):
        lines.append("")  # else the next line would belong to the list
    kernels = [escape(common.backend(arm, report)) for arm in (base, cand)]
    lines.append(f"kernels: baseline {kernels[0]}; candidate {kernels[1]}  ")
    return lines


def _compact(report: common.Report, comparison: Mapping[str, Any]) -> str:
    numbers = comparison["numbers"]
    line = f"- {_title(report, comparison)}: {escape(comparison['headline'])}"
    return line if numbers is None else f"{line} flips {common.flips_words(numbers)}"


def _pair(entry: Mapping[str, Any]) -> str:
    def counts(share: Mapping[str, Any] | None) -> str:
        return "–" if share is None else f"{share['right']}/{share['n']}"

    return f"{counts(entry['scores']['strict'])} / {counts(entry['scores']['flexible'])}"


def _ended(entry: Mapping[str, Any]) -> str:
    statuses = entry["statuses"]
    return f"{statuses['empty']} / {statuses['truncated']} / {statuses['error']}"


def _tokens(entry: Mapping[str, Any]) -> str:
    mean = entry["mean_completion_tokens"]
    return "–" if mean is None else f"{mean:.1f}"


def _provenance(report: common.Report) -> str:
    protocol = report["protocol"]
    base = common.arm(report, "baseline")
    return (
        f"protocol {common.short(report['protocol_sha256'])} · data {common.short(protocol.get('dataset_sha256'))} · "
        f"{protocol['items']} items, {protocol.get('shots', '?')} shots · moe-parity {report['tool']['version']}, "
        f"{escape(common.versions(base))} · cmd: {code(report['command'], 400)}"
    )


def _flips(comparisons: list[Mapping[str, Any]], room: int) -> list[str]:
    flips = [(c, x) for c in comparisons for x in c["notable"] if x["kind"] in ("worse", "better")]
    total = sum(c["numbers"]["table"]["b"] + c["numbers"]["table"]["c"] for c in comparisons if c["numbers"])
    keep = min(len(flips), room - 4)
    if keep <= 0:
        return []
    lines = [f"<details><summary>{total} flipped answers (first {keep})</summary>", ""]
    for _, flip in flips[:keep]:
        base, cand = (flip[side]["extracted"] or flip[side]["status"] for side in ("baseline", "candidate"))
        where = flip["difference"]
        parts = ""
        if where:
            parts = f", first differing {where['unit']} {where['index'] + 1}: " + (
                f"{code(where['baseline'], 20)} → {code(where['candidate'], 20)}"
            )
        lines.append(
            f"- {flip['kind']} {code(flip['item'])}: gold {code(flip['gold'], 20)}, {code(base, 20)} → "
            f"{code(cand, 20)}{parts}"
        )
    return [*lines, "", "</details>"]
