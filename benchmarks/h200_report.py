"""Turns benchmarks/results/h200-moe.json into docs/img/roofline.png and Markdown tables on standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_kernels.bench import SHAPES, Ceilings, Row  # noqa: E402
from moe_kernels.roofline import plot  # noqa: E402

BEFORE = "fp8/triton:bias=bf16,scales=copied"
STAGES = ("route_sort_quantise", "gemm1", "gemm2", "combine")


def load() -> tuple[list[Row], Ceilings, str]:
    """Rows and the ceilings measured in the same run."""
    results = ROOT / "benchmarks" / "results"
    meta = json.loads((results / "h200-moe.meta.json").read_text())
    known = {"shape", "tokens", "variant", "stage", "us", "floor_us", "peer", "peer_us"}
    rows = [
        Row(**{k: v for k, v in entry.items() if k in known}, detail={k: v for k, v in entry.items() if k not in known})
        for entry in json.loads((results / "h200-moe.json").read_text())
    ]
    ceilings = Ceilings(meta["read_bytes_per_s"], meta["flops"], meta["source"])
    return rows, ceilings, meta["device"]


def table(header: list[str], lines: list[list[str]]) -> None:
    """A Markdown table."""
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def pairs() -> None:
    """What the change saved where both paths chose the same experts."""
    path = ROOT / "benchmarks" / "results" / "h200-pairs.json"
    if path.is_file():
        rows = [r for r in json.loads(path.read_text()) if "saved_us" in r]
        print("### Same routing before and after, glm-4.5-air\n")
        table(["tokens", "after µs", "saved, mean ± 95 %"],
              [[f"{r['tokens']:,}", f"{r['us']:,.1f}", f"{r['saved_us']:+.2f} ± {r['saved_ci95_us']:.2f}"]
               for r in rows])


def main() -> None:
    """Print the tables and draw the plot."""
    rows, ceilings, device = load()
    layer = {(r.shape, r.tokens, r.variant): r for r in rows if r.stage == "layer"}
    stage = {(r.tokens, r.stage): r for r in rows if r.stage != "layer"}
    for name in dict.fromkeys(r.shape for r in rows):
        shape, lines = SHAPES[name], []
        for (s, t, v), after in layer.items():
            if s != name or v != "fp8/triton":
                continue
            before = layer[s, t, BEFORE]
            saved, width = (float(str(after.detail[k])) for k in ("saved_us", "saved_ci95_us"))
            tflops = 6.0 * t * shape.top_k * shape.hidden * shape.intermediate / after.us * 1e-6
            floor = after.floor_us or 0.0
            lines.append([
                f"{t:,}", str(after.detail["experts_hit"]), f"{before.us:,.1f}", f"{after.us:,.1f}",
                f"{after.detail['p10_us']:,.1f}–{after.detail['p90_us']:,.1f}",
                f"{saved:+.1f} ± {width:.1f} ({saved / before.us:+.1%})", f"{floor:,.1f}", f"{after.us / floor:.2f}",
                f"{tflops:,.0f}",
                f"{after.peer_us:,.1f}" if after.peer_us else "",
            ])
        print(f"### {name}\n")
        table(["tokens", "hit", "before µs", "after µs", "p10–p90", "saved, mean ± 95 %", "floor µs",
               "after / floor", "TFLOP/s", "DeepGEMM, two GEMMs (quoted)"], lines)
    pairs()
    print("### Stages of fp8/triton, glm-4.5-air\n")
    tokens = list(dict.fromkeys(t for t, _ in stage))
    table(["tokens", *STAGES], [[f"{t:,}", *(f"{stage[t, s].us:,.1f}" for s in STAGES)] for t in tokens])
    print("### nvfp4/triton, glm-4.5-air\n")
    table(["tokens", "µs", "floor µs"], [[f"{t:,}", f"{r.us:,.1f}", f"{r.floor_us:,.1f}"]
                                        for (s, t, v), r in layer.items() if v == "nvfp4/triton"])
    print("### Peers, glm-4.5-air, same run\n")
    others = [r for r in rows if "/" not in r.variant.split(" ")[0]]
    table(["tokens", "what", "µs"], [[f"{r.tokens:,}", r.variant, f"{r.us:,.1f}"] for r in others])
    image = ROOT / "docs" / "img" / "roofline.png"
    image.parent.mkdir(parents=True, exist_ok=True)
    air = [r for r in rows if r.shape == "glm-4.5-air" and r.variant in ("fp8/triton", "nvfp4/triton")]
    plot(air, SHAPES["glm-4.5-air"], ceilings, image, device)


if __name__ == "__main__":
    main()
