"""Puts the results of benchmarks/h200_kernels.sh (its unpacked folder) into benchmarks/results and the tuned tables.

python3 benchmarks/h200_kernels_merge.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "moe_kernels" / "variants" / "configs"


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of one shape, format and token count over its seeds."""
    def most(name: str) -> float:
        return max(case[name] for case in cases)

    def every(name: str) -> bool:
        return all(case[name] for case in cases)

    return {
        "shape": cases[0]["shape"], "format": cases[0]["format"], "tokens": cases[0]["tokens"], "seeds": len(cases),
        "ids_equal": every("ids_equal"), "cases_with_other_ids": sum(not case["ids_equal"] for case in cases),
        "repeat_equal": every("repeat_equal"),
        "route_then_experts_equal": every("apart_equal"), "graph_equal": every("graph_equal"),
        "finite": every("finite"), "weights_max_diff": most("weights_max"),
        "rel_emulated_max": round(most("rel_emulated"), 6), "worst_row_max": round(most("worst_row"), 6),
        "calc_diff_max": float(f"{most('calc_diff'):.3g}"), "rel_oracle_max": round(most("rel_oracle"), 6),
        "emulated_vs_oracle_max": round(most("emulated_vs_oracle"), 6),
    }


def merge_check(folder: Path) -> None:
    """New rows take the place of old ones that have no more seeds."""
    target = RESULTS / "h200-check.json"
    old, new = json.loads(target.read_text()), json.loads((folder / "check.json").read_text())
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for case in new.pop("parity"):
        groups.setdefault((case["shape"], case["format"], case["tokens"]), []).append(case)
    prefix = max(c.get("prefix_difference", 0.0) for cases in groups.values() for c in cases)
    rows = {(r["shape"], r["format"], r["tokens"]): r for r in old.pop("parity")}
    for key, cases in groups.items():
        if key not in rows or len(cases) >= rows[key]["seeds"]:
            rows[key] = summary(cases)
    old.pop("graph", None)  # now of every case
    whole = {**old, **new, "prefix_difference_max": prefix, "parity": list(rows.values())}
    target.write_text(json.dumps(whole, indent=0) + "\n")
    seeds: dict[tuple[str, str], set[int]] = {}
    for row in whole["parity"]:
        seeds.setdefault((row["shape"], row["format"]), set()).add(row["seeds"])
    print(sum(r["seeds"] for r in whole["parity"]), "cases", {k: sorted(v) for k, v in seeds.items()}, "prefix", prefix)


def merge_times(folder: Path) -> None:
    """Times are of one run: the whole file is replaced."""
    (RESULTS / "h200-moe.json").write_text((folder / "h200-moe.json").read_text())
    (RESULTS / "h200-moe.meta.json").write_text((folder / "meta.json").read_text())
    for table in sorted(folder.glob("fp8_*.json")):
        (CONFIGS / table.name).write_text(table.read_text())
        print(table.name, list(json.loads(table.read_text())["configs"]))


def main() -> None:
    """Merge what the folder holds."""
    folder = Path(sys.argv[1])
    if (folder / "check.json").is_file():
        merge_check(folder)
    if (folder / "pairs.json").is_file():
        (RESULTS / "h200-pairs.json").write_text((folder / "pairs.json").read_text())
    if (folder / "h200-moe.json").is_file():
        merge_times(folder)


if __name__ == "__main__":
    main()
