"""report.json as JUnit XML: one test case per gate, so that CI systems show which question failed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from evals.report import common

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """Text without the characters XML 1.0 cannot hold."""
    return _ILLEGAL.sub("\ufffd", text)


def render(report: common.Report) -> str:
    """JUnit XML. FAIL and CHANGED gates are failures, inconclusive and invalid ones errors, the rest skipped."""
    root = ET.Element("testsuites", name="moe-parity")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for comparison in report["comparisons"]:
        counts = _suite(root, report, comparison)
        for key, value in counts.items():
            totals[key] += value
    root.attrib.update({k: str(v) for k, v in totals.items()})
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, report: common.Report, comparison: Mapping[str, Any]) -> dict[str, int]:
    name = clean(f"{report['task']}: {comparison['baseline_variant']} -> {comparison['variant']}")
    suite = ET.SubElement(root, "testsuite", name=name)
    properties = ET.SubElement(suite, "properties")
    base, cand = common.arm(report, "baseline"), common.arm(report, comparison["name"])
    for key, value in {
        "state": comparison["state"],
        "headline": comparison["headline"],
        "margin": report["margin"],
        "alpha": report["alpha"],
        "protocol_sha256": report["protocol_sha256"],
        "dataset_sha256": report["protocol"].get("dataset_sha256", ""),
        "baseline_weights_sha256": (base["server"] or {}).get("weights_sha256", ""),
        "candidate_weights_sha256": (cand["server"] or {}).get("weights_sha256", ""),
        "baseline_kernels": common.backend(base, report),
        "candidate_kernels": common.backend(cand, report),
        "tool_version": report["tool"]["version"],
        "command": report["command"],
    }.items():
        ET.SubElement(properties, "property", name=key, value=clean(str(value)))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for gate in comparison["gates"]:
        counts["tests"] += 1
        case = ET.SubElement(suite, "testcase", classname=name, name=gate["name"])
        state, summary = gate["state"], clean(gate["summary"])
        if state in ("fail", "changed"):
            counts["failures"] += 1
            ET.SubElement(case, "failure", type=state.upper(), message=summary).text = _detail(comparison, gate)
        elif state in ("inconclusive", "invalid"):
            counts["errors"] += 1
            ET.SubElement(case, "error", type=state.upper(), message=summary).text = _detail(comparison, gate)
        elif state == "skipped":
            counts["skipped"] += 1
            ET.SubElement(case, "skipped", message=summary)
        else:
            ET.SubElement(case, "system-out").text = summary
    suite.attrib.update({k: str(v) for k, v in counts.items()})
    return counts


def _detail(comparison: Mapping[str, Any], gate: Mapping[str, Any]) -> str:
    lines = [gate["summary"], *comparison["advice"], *comparison["warnings"]]
    return clean("\n".join(lines))
