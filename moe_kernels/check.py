"""Kernel parity: each MoE layer on captured activations against the FP32 oracle and the emulation.

Thresholds, with their reasons:

- against the emulation, calc_diff < 1.5e-3 for every format. The emulation quantises as the kernel does, so summation
  order and BF16 rows differ by 1e-5 or less; the TRT-LLM path also stores gate and up as E4M3 before the SwiGLU, which
  costs 7e-4 on trained and 1.2e-3 on random activations (fault `gate_up_fp8`, benign). DeepGEMM's bound for one FP8
  GEMM is 1e-3.
- against the oracle (activations not quantised), 4e-3 for FP8 and 5e-2 for NVFP4: the emulation's bound plus the
  formats' own activation error, 4e-4 to 1e-3 and 1e-2 to 2e-2 on trained activations; NVFP4's is vLLM's. BF16: 1e-3.

Tokens that went to other experts at a near tie (selection keys closer than BF16's step, as BF16 logits make them) are
left out: their output is another one, and neither is wrong. Other flips count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_kernels import registry
from moe_kernels.capture import capture_moe_inputs, moe_blocks
from moe_kernels.check_static import layer_fault, rope_fault
from moe_kernels.numerics import calc_diff, matched_ratio, max_ulp, relative_l2
from moe_kernels.records import ExpertWeights, Routing
from moe_kernels.registry import MoELayer, VariantSpec
from moe_kernels.routing import near_tie_gap, routing_agreement, selection_scores

EMULATION_LIMIT = 1.5e-3
FEW_TOKENS, FEW_FACTOR = 16, 2.0  # below 16 tokens a calc_diff scatters: twice the limit
WHOLE_MODEL = -1  # `layer` of findings that belong to no MoE layer
NEAR_TIE = 2.0**-8  # BF16's step just below 1, the largest score
EXTREME_LIMIT = 5e-2  # a coarse probe: BF16 logits, which kernels may take, move weights by percents at -12
ORACLE_LIMIT = {
    "bf16": 1e-3, "fp8": 4e-3, "fp8_channel": 4e-3, "fp8_tensor": 4e-3, "nvfp4": 5e-2, "mxfp8": 4e-3, "mxfp4": 5e-2,
}  # fmt: skip
SWEEP = (1, 2, 3, 5, 7, 8, 16, 31, 64, 128, 256)
QUICK_SWEEP = (1, 3, 8, 128)


@dataclass(frozen=True)
class Finding:
    """One probe of one layer: `value` against `limit`; `ok` False makes the check fail."""

    layer: int
    probe: str  # parity, repeat, batch, zero-block, extreme-logits, padding, graph, contract
    tokens: int
    ok: bool
    value: float
    limit: float
    detail: str = ""
    cause: str = ""  # "routing": fails, but not on the tokens that went to the same experts


@dataclass
class CheckReport:
    """All findings of one variant; `isclose_share` and `relative` are what other projects' gates would look at."""

    variant: str
    findings: list[Finding] = field(default_factory=list)
    isclose_share: float = 1.0  # least share under FlashInfer's FP8-block rule (atol .1, rtol .85, passes at .79)
    vllm_share: float = 1.0  # least share under vLLM's torch.testing rule (atol = rtol = .035, passes at 1)

    @property
    def ok(self) -> bool:
        """Whether every probe passed."""
        return all(f.ok for f in self.findings)

    def failed(self, probe: str | None = None) -> list[Finding]:
        """Failed findings, of one probe or of all."""
        return [f for f in self.findings if not f.ok and (probe is None or f.probe == probe)]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; infinities become strings."""
        rows = [
            {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(f).items()}
            for f in self.findings
        ]
        return {
            "variant": self.variant,
            "ok": self.ok,
            "isclose_share": self.isclose_share,
            "vllm_share": self.vllm_share,
            "findings": rows,
        }


class Reference:
    """One MoE layer's weights, captured inputs, and what the emulation and the oracle make of them (computed once)."""

    def __init__(self, index: int, record: ExpertWeights, layer: MoELayer, hidden: Tensor, logits: Tensor) -> None:
        self.index, self.record, self.hidden, self.logits = index, record, hidden, logits
        fmt = layer.spec.format
        plain = VariantSpec(fmt, "emulated" if fmt != "bf16" else "reference")

        def build(spec: VariantSpec) -> MoELayer:
            return registry.layer_class(spec)(record, layer.config, layer.bias, spec)

        self.emulated, self.oracle = build(plain), build(VariantSpec(fmt, "reference"))
        self._wanted: dict[int, tuple[Tensor, Routing, Tensor]] = {}

    def alike(self, layer: MoELayer) -> tuple[str, MoELayer]:
        """What has the numerics of `layer`: the emulation; for a reference (activations not quantised) the oracle."""
        return ("oracle", self.oracle) if layer.spec.backend == "reference" else ("emulation", self.emulated)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` captured rows, repeated where the text was shorter."""
        index = torch.arange(tokens, device=self.hidden.device) % self.hidden.shape[0]
        return self.hidden[index], self.logits[index]

    def wanted(self, tokens: int) -> tuple[Tensor, Routing, Tensor]:
        """(emulation's output, its routing, the oracle's output) for `tokens` rows."""
        if tokens not in self._wanted:
            hidden, logits = self.inputs(tokens)
            want, routing = _run(self.emulated, hidden, logits)
            self._wanted[tokens] = want, routing, _run(self.oracle, hidden, logits)[0]
        return self._wanted[tokens]


def capture(model: Any, token_ids: Sequence[int], device: torch.device | str = "cpu") -> dict[int, list[Tensor]]:
    """Inputs of every MoE layer for a text: {layer: [hidden [T, H], logits [T, E]]}."""
    ids = torch.tensor([list(token_ids)], device=device)
    with torch.inference_mode(), capture_moe_inputs(model) as inputs:
        model.model(input_ids=ids, position_ids=torch.arange(ids.shape[1], device=device)[None], use_cache=False)
    return inputs


def references(loaded: Any, token_ids: Sequence[int]) -> dict[int, Reference]:
    """A `Reference` for every MoE layer of a `LoadedModel`, on the activations of a text."""
    return references_from(loaded, capture(loaded.model, token_ids, loaded.device))


def references_from(loaded: Any, seen: Mapping[int, Sequence[Tensor]]) -> dict[int, Reference]:
    """The same from captured inputs {layer: [hidden [T, H], logits [T, E]]}."""
    blocks: dict[int, Any] = dict(moe_blocks(loaded.model))
    return {
        index: Reference(index, loaded.checkpoint.experts(index).to(loaded.device), blocks[index].layer, *inputs)
        for index, inputs in seen.items()
    }


def check_model(
    loaded: Any,
    refs: dict[int, Reference],
    sweep: Sequence[int] = SWEEP,
    records: Callable[[int], ExpertWeights] | None = None,
) -> CheckReport:
    """Check every MoE layer of a loaded model as it is now; `records` gives a layer's weights as handed to the kernel
    (default: the checkpoint's)."""
    report = CheckReport(str(loaded.variant))
    report.findings.append(_contract(WHOLE_MODEL, rope_fault(loaded.model)))
    blocks: dict[int, Any] = dict(moe_blocks(loaded.model))
    for index, block in blocks.items():
        record = (records or loaded.checkpoint.experts)(index)
        report.findings.append(_contract(index, layer_fault(index, record, block.layer)))
        compare_layer(block.layer, refs[index], sweep, report)
    return report


def _contract(layer: int, fault: str | None) -> Finding:
    return Finding(layer, "contract", 0, fault is None, float(fault is not None), 0.0, fault or "")


def compare_layer(layer: MoELayer, reference: Reference, sweep: Sequence[int], report: CheckReport) -> None:
    """Parity over the M sweep, then the probes, appended to `report`."""
    for tokens in sweep:
        slack = FEW_FACTOR if tokens < FEW_TOKENS else 1.0
        coarse = 2.0 * slack if tokens < 4 else slack  # a single token's NVFP4 error reached 0.1
        limits = {"emulation": EMULATION_LIMIT * slack, "oracle": ORACLE_LIMIT[layer.spec.format] * coarse}
        if reference.alike(layer)[0] == "oracle":
            del limits["emulation"]
        got, chosen = _run(layer, *reference.inputs(tokens))
        want, routing, exact = reference.wanted(tokens)
        report.isclose_share = min(report.isclose_share, matched_ratio(exact, got, atol=0.1, rtol=0.85))
        report.vllm_share = min(report.vllm_share, matched_ratio(exact, got, atol=0.035, rtol=0.035))
        rows = _comparable(reference, tokens, chosen, routing)
        for against, limit in limits.items():
            target = {"emulation": want, "oracle": exact}[against]
            value = calc_diff(got[rows], target[rows]) if bool(rows.any()) else 0.0
            ok = value < limit
            detail = f"against the {against}" if ok else _worst(against, got, target, chosen, routing)
            cause = "" if ok else _cause(got, want, chosen, routing, EMULATION_LIMIT * slack)
            report.findings.append(Finding(reference.index, "parity", tokens, ok, value, limit, detail, cause))
    _probes(layer, reference, report)


def _comparable(reference: Reference, tokens: int, chosen: Routing, routing: Routing) -> Tensor:
    """bool [T]: not the tokens that went to other experts at a near tie, which a BF16 step of the logits may decide."""
    layer = reference.emulated
    _, keys = selection_scores(reference.inputs(tokens)[1], layer.bias, layer.config)
    near = near_tie_gap(keys, layer.config.top_k, torch.float32).gap < NEAR_TIE
    return routing_agreement(chosen.ids, routing.ids).exact | ~near


def _run(layer: MoELayer, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Routing]:
    with torch.inference_mode():
        out, routing = layer.forward(hidden.clone(), logits.clone())
    return out.float(), routing


def _worst(against: str, got: Tensor, want: Tensor, chosen: Routing, routing: Routing) -> str:
    """The worst token with its experts, relative error, max ulp and how much of the routing agrees."""
    error = (got - want).norm(dim=-1)
    token = int(torch.where(error.isnan(), torch.inf, error).argmax())
    experts, other = sorted(routing.ids[token].tolist()), sorted(chosen.ids[token].tolist())
    same = routing_agreement(chosen.ids, routing.ids).exact_share
    return (
        f"against the {against}: relative L2 {relative_l2(got, want):.3g}, "
        f"{max_ulp(got.bfloat16(), want.bfloat16())} BF16 ulp, same expert set for {same:.1%} of tokens, "
        f"worst token {token} with experts {experts}" + (f", kernel chose {other}" if other != experts else "")
    )


def _cause(got: Tensor, want: Tensor, chosen: Routing, routing: Routing, limit: float) -> str:
    same = routing_agreement(chosen.ids, routing.ids).exact
    rest = not bool(same.all()) and (not bool(same.any()) or calc_diff(got[same], want[same]) < limit)
    return "routing" if rest else ""


def _probes(layer: MoELayer, reference: Reference, report: CheckReport) -> None:
    """Repeatability, batch invariance, zero blocks, extreme logits, poisoned padding, graph replay."""
    hidden, logits = reference.inputs(31)
    alike = reference.alike(layer)

    def add(probe: str, tokens: int, ok: bool, value: float, limit: float, detail: str, cause: str = "") -> None:
        report.findings.append(Finding(reference.index, probe, tokens, ok, value, limit, "" if ok else detail, cause))

    first, _ = _run(layer, hidden, logits)
    again = max(calc_diff(_run(layer, hidden, logits)[0], first) for _ in range(3))
    add("repeat", 31, again == 0.0, again, 0.0, "three runs on the same input differ")

    alone = torch.cat([_run(layer, hidden[i : i + 1], logits[i : i + 1])[0] for i in (0, 5, 7, 30)])
    value = calc_diff(alone, first[[0, 5, 7, 30]])
    add("batch", 31, value < 1e-6, value, 1e-6, "rows alone differ from the same rows inside a batch of 31")

    blocked = hidden.clone()
    blocked[0] = 0
    blocked[1, : min(128, blocked.shape[1])] = 0
    _against(layer, alike, blocked, logits, "zero-block", add, "an all-zero group of activations")
    for shift in (-12.0, -60.0):
        low, what = logits - logits.amax() + shift, f"all router logits below {shift:g}"
        _against(layer, alike, hidden, low, "extreme-logits", add, what)

    storage = torch.full((35, hidden.shape[1]), float("nan"), dtype=hidden.dtype, device=hidden.device)
    storage[:31] = hidden
    padded, _ = _run_uncloned(layer, storage[:31], logits)
    value = calc_diff(padded, first)
    add("padding", 31, value == 0.0, value, 0.0, "memory behind the last token changes the result")
    if hidden.is_cuda:
        value = _graph_difference(layer, hidden, logits, first)
        add("graph", 31, value == 0.0, value, 0.0, "graph replay differs from the eager call")


def _run_uncloned(layer: MoELayer, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Routing]:
    with torch.inference_mode():
        out, routing = layer.forward(hidden, logits.clone())
    return out.float(), routing


def _against(
    layer: MoELayer,
    alike: tuple[str, MoELayer],
    hidden: Tensor,
    logits: Tensor,
    probe: str,
    add: Callable[..., None],
    what: str,
) -> None:
    got, chosen = _run(layer, hidden, logits)
    want, routing = _run(alike[1], hidden, logits)
    value = calc_diff(got, want)
    limit = EXTREME_LIMIT if probe == "extreme-logits" else EMULATION_LIMIT
    ok = value < limit
    cause = "" if ok else _cause(got, want, chosen, routing, limit)
    add(probe, hidden.shape[0], ok, value, limit, f"{what}: {_worst(alike[0], got, want, chosen, routing)}", cause)


def _graph_difference(layer: MoELayer, hidden: Tensor, logits: Tensor, eager: Tensor) -> float:
    """calc_diff of a CUDA graph's replay, captured on other data, against the eager result."""
    static_hidden, static_logits = torch.zeros_like(hidden), torch.zeros_like(logits)
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                layer.forward(static_hidden, static_logits)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = layer.forward(static_hidden, static_logits)
        static_hidden.copy_(hidden)
        static_logits.copy_(logits)
        graph.replay()
        torch.cuda.synchronize()
    return calc_diff(out.float(), eager)
