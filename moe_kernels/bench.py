"""Times MoE layers and their stages: CUDA-graph replay on a GPU, wall clock on a CPU, against a measured floor."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor

from moe_kernels.convert import quantize_record
from moe_kernels.errors import VariantError
from moe_kernels.quant import fp8
from moe_kernels.records import ExpertWeights, MoEShape, RoutingConfig, WeightFormat
from moe_kernels.registry import MoELayer, layer_class, parse, supports

Call = Callable[[], object]


@dataclass(frozen=True)
class BenchShape:
    """MoE sizes of a public model (config.json: hidden_size, moe_intermediate_size, n_routed_experts, ...)."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    scaling: float

    @property
    def moe(self) -> MoEShape:
        """As `supports` wants it."""
        return MoEShape(self.hidden, self.intermediate, self.experts, self.top_k)

    @property
    def routing(self) -> RoutingConfig:
        """Sigmoid scores, one group, normalised, scaled."""
        return RoutingConfig(self.experts, self.top_k, routed_scaling_factor=self.scaling)


SHAPES = {
    s.name: s
    for s in (
        BenchShape("glm-4.5-air", 4096, 1408, 128, 8, 1.0),
        BenchShape("glm-4.7", 5120, 1536, 160, 8, 2.5),
        BenchShape("glm-4.7-flash", 2048, 1536, 64, 4, 1.8),
        BenchShape("glm-5", 6144, 2048, 256, 8, 2.5),
        BenchShape("mini", 512, 128, 16, 4, 2.5),
    )
}


@dataclass(frozen=True)
class Ceilings:
    """What the device really does: bytes/s read, FLOP/s of a dense product in the layer's format."""

    read: float
    flops: float
    source: str


@dataclass
class Row:
    """One measured number; `stage` is `layer` for the whole. Times in µs, `floor_us` from bytes and FLOP."""

    shape: str
    tokens: int
    variant: str
    stage: str
    us: float
    floor_us: float | None = None
    peer: str | None = None
    peer_us: float | None = None
    detail: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Flat dict; empty details are left out."""
        row = asdict(self)
        detail = row.pop("detail")
        return row | detail


def random_record(shape: BenchShape, fmt: WeightFormat, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Random weights with the spread of a trained layer (std 1/sqrt(K)), made on `device`; no zeros, no NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    e, h, i = shape.experts, shape.hidden, shape.intermediate

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    if fmt == "bf16":
        w13 = torch.stack([(normal(2 * i, h) * h**-0.5).bfloat16() for _ in range(e)])
        return ExpertWeights("bf16", w13, torch.stack([(normal(h, i) * i**-0.5).bfloat16() for _ in range(e)]))
    if fmt == "fp8":
        def quantised(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            q = torch.empty(e, rows, columns, dtype=fp8.E4M3, device=device)
            for matrix in q:
                matrix.copy_(normal(rows, columns).mul_(100).clamp_(-448, 448))
            blocks = torch.rand(e, -(-rows // 128), -(-columns // 128), generator=generator, device=device)
            return q, (0.5 + blocks) / 100 * columns**-0.5

        w13, s13 = quantised(2 * i, h)
        w2, s2 = quantised(h, i)
        return ExpertWeights("fp8", w13, w2, s13, s2)
    if fmt == "nvfp4":
        def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = torch.randint(0, 256, (e, rows, columns // 2), generator=generator, device=device,
                                  dtype=torch.uint8)
            scale = torch.rand(e, rows, columns // 16, generator=generator, device=device).mul_(200).add_(50)
            return codes, scale.to(fp8.E4M3)

        w13, s13 = packed(2 * i, h)
        w2, s2 = packed(h, i)
        unit = 1 / (3 * 150)  # brings e2m1 * scale to a spread of about one
        two = torch.rand(e, 2, generator=generator, device=device).add_(0.5).mul_(unit * h**-0.5)
        return ExpertWeights("nvfp4", w13, w2, s13, s2, two, torch.full((e,), unit * i**-0.5, device=device))
    record = random_record(shape, "bf16", device, seed)
    return quantize_record(record, fmt)


def inputs(
    shape: BenchShape, tokens: int, count: int, device: torch.device, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """`count` pairs of hidden BF16 [T, H] and logits FP32 [T, E].

    With few tokens the choice is steered so that consecutive inputs use disjoint experts, else the L2 cache
    would serve weights that the call before it read.
    """
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for n in range(count):
        hidden = torch.randn(tokens, shape.hidden, generator=generator, device=device).bfloat16()
        logits = torch.randn(tokens, shape.experts, generator=generator, device=device)
        if tokens == 1:
            chosen = (torch.arange(shape.top_k, device=device) + n * shape.top_k) % shape.experts
            logits[:, chosen] += 8
        made.append((hidden, logits))
    return made


def correction_bias(shape: BenchShape, device: torch.device) -> Tensor:
    """FP32 [E] near 7, as GLM-5.2's (kernels.md §0), narrow enough that the logits decide."""
    generator = torch.Generator(device).manual_seed(7)
    return 7 + 0.1 * torch.rand(shape.experts, generator=generator, device=device)


def make_layer(variant: str, shape: BenchShape, record: ExpertWeights, bias: Tensor) -> MoELayer:
    """A layer of `variant`, or VariantError with the reason it cannot run here."""
    spec = parse(variant)
    support = supports(spec, record.w13.device, shape.moe)
    if not support.ok:
        raise VariantError(f"{support.reason}; nearest that runs here: {support.nearest}")
    return layer_class(spec)(record, shape.routing, bias, spec)


def graph_us(calls: Sequence[Call], replays: int = 20, warmup: int = 2) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of µs per call, replaying one CUDA graph of all `calls`."""
    graph = capture(calls)
    samples = [_replay_us(graph, len(calls)) for _ in range(replays + warmup)][warmup:]
    return spread(samples)


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all calls; they are run once before, which also compiles their kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # nothing may be freed by chance during capture; torch.cuda.graph collects first, which takes 0.1 s
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
            if collecting:
                gc.enable()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def alternate_samples(many: Sequence[Sequence[Call]], rounds: int = 30) -> list[list[float]]:
    """µs per call of several sets of calls, each a CUDA graph, replayed in turn: `rounds` samples a set.

    Every other round goes backwards, so that neither drift of the clock nor the place in the round favours a set.
    """
    graphs = [(capture(calls), len(calls)) for calls in many]
    samples: list[list[float]] = [[] for _ in graphs]
    for number in range(rounds + 2):
        order = range(len(graphs)) if number % 2 == 0 else reversed(range(len(graphs)))
        for index in order:
            us = _replay_us(*graphs[index])
            if number >= 2:
                samples[index].append(us)
    return samples


def alternate_us(many: Sequence[Sequence[Call]], rounds: int = 30) -> list[tuple[float, float, float]]:
    """As `graph_us` for several sets of calls, replayed in turn."""
    return [spread(s) for s in alternate_samples(many, rounds)]


def paired_difference(first: Sequence[float], second: Sequence[float], batch: int = 10) -> tuple[float, float]:
    """Mean of second - first over rounds and the half-width of its 95 % interval.

    From the means of `batch` neighbouring rounds (normal quantile on at least ten of them), since neighbouring
    rounds are not independent: the clock drifts.
    """
    rounds = [b - a for a, b in zip(first, second, strict=True)]
    means = [statistics.mean(rounds[i : i + batch]) for i in range(0, len(rounds) - batch + 1, batch)]
    width = 1.96 * statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("inf")
    return statistics.mean(rounds), width


def wall_us(calls: Sequence[Call], repeats: int = 5) -> tuple[float, float, float]:
    """The same by wall clock, for the CPU."""
    calls[0]()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - start) * 1e6 / len(calls))
    return spread(samples)


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def experts_hit(ids: Tensor) -> int:
    """Number of distinct experts in ids [T, k] (synchronises)."""
    return int(ids.unique().numel())


def bytes_read(shape: BenchShape, record: ExpertWeights, tokens: int, hit: int, stage: str = "layer") -> float:
    """Bytes that must move: the hit experts' weights and scales once; for `layer` hidden in and output out (BF16)."""
    first, second = ("w13", "w13_scale"), ("w2", "w2_scale")
    parts = {"layer": first + second, "gemm1": first, "gemm2": second}
    tensors = [getattr(record, name) for name in parts[stage]]
    size = sum(t.numel() * t.element_size() for t in tensors if t is not None) * hit / shape.experts
    return size + (4.0 * tokens * shape.hidden if stage == "layer" else 0.0)


def floor_us(
    shape: BenchShape, record: ExpertWeights, tokens: int, hit: int, ceilings: Ceilings, stage: str = "layer"
) -> float:
    """The larger of bytes / read rate and FLOP / peak for `stage` in layer, gemm1, gemm2."""
    macs = {"layer": 3, "gemm1": 2, "gemm2": 1}[stage] * shape.hidden * shape.intermediate
    flops = 2.0 * tokens * shape.top_k * macs
    return max(bytes_read(shape, record, tokens, hit, stage) / ceilings.read, flops / ceilings.flops) * 1e6


def measure_ceilings(device: torch.device) -> Ceilings:
    """Read rate of a large reduction and the rate of a large product (FP8 on a GPU that has it, FP32 on a CPU)."""
    if device.type != "cuda":
        size = 1 << 25
        read = 4 * size / (wall_us([torch.randn(size).sum])[0] * 1e-6)
        a = torch.randn(1024, 1024)
        return Ceilings(read, 2 * 1024**3 / (wall_us([lambda: a @ a])[0] * 1e-6), "FP32 sum and product, wall clock")
    size = 1 << 30
    read = 4 * size / (graph_us([torch.randn(size, device=device).sum] * 3)[0] * 1e-6)
    n = 8192
    if torch.cuda.get_device_capability(device) >= (8, 9):
        a = torch.randn(n, n, device=device).to(fp8.E4M3)
        b = torch.randn(n, n, device=device).to(fp8.E4M3).t()
        one = torch.ones((), device=device)
        us = graph_us([lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)] * 3)[0]
        source = "FP32 sum of 4 GB; FP8 _scaled_mm 8192^3, one scale a tensor"
    else:
        a = torch.randn(n, n, device=device).bfloat16()
        us = graph_us([lambda: a @ a] * 3)[0]
        source = "FP32 sum of 4 GB; BF16 product 8192^3"
    return Ceilings(read, 2 * n**3 / (us * 1e-6), source)


def layer_calls(layer: MoELayer, data: Sequence[tuple[Tensor, Tensor]]) -> list[Call]:
    """One call of the whole layer per input."""
    return [partial(layer.forward, hidden, logits) for hidden, logits in data]


def input_count(tokens: int) -> int:
    """Inputs to rotate: 16 for few tokens, one call for many."""
    return 16 if tokens <= 8 else 8 if tokens <= 512 else 3 if tokens <= 8192 else 2


def time_layers(
    variants: Sequence[str], shape: BenchShape, tokens: Sequence[int], device: torch.device, ceilings: Ceilings,
    rounds: int = 30, same_routing: bool = False,
) -> list[Row]:
    """The whole layer of each variant at each token count; variants take turns within a token count.

    `same_routing` takes a bias that BF16 holds exactly, so that `bias=bf16` chooses the same experts. Of
    two variants on a GPU, the first's rows say how much faster it was: `saved_us` +- `saved_ci95_us`.
    """
    bias = correction_bias(shape, device)
    if same_routing:
        bias = bias.bfloat16().float()
    records: dict[str, ExpertWeights] = {}
    layers = []
    for variant in variants:
        fmt = parse(variant).format
        if fmt not in records:
            records[fmt] = random_record(shape, fmt, device)  # type: ignore[arg-type]
        layers.append(make_layer(variant, shape, records[fmt], bias))
    rows = []
    for count in tokens:
        data = inputs(shape, count, input_count(count) if device.type == "cuda" else 1, device)
        calls = [layer_calls(layer, data) for layer in layers]
        paired: dict[str, object] = {}
        if device.type == "cuda":
            samples = alternate_samples(calls, rounds)
            times = [spread(s) for s in samples]
            if len(samples) == 2:
                saved, width = paired_difference(samples[0], samples[1])
                paired = {"saved_us": saved, "saved_ci95_us": width, "rounds": rounds}
        else:
            times = [wall_us(c) for c in calls]
        for variant, layer, (us, low, high) in zip(variants, layers, times, strict=True):
            hit = round(statistics.mean(experts_hit(layer.route(logits).ids) for _, logits in data))
            record = records[parse(variant).format]
            floor = floor_us(shape, record, count, hit, ceilings)
            detail: dict[str, object] = {"p10_us": low, "p90_us": high, "experts_hit": hit,
                                         "bytes": bytes_read(shape, record, count, hit)}
            if variant == variants[0]:
                detail |= paired
            rows.append(Row(shape.name, count, variant, "layer", us, floor, detail=detail))
    return rows
