"""Emulated variants: the numerics of the quantised kernels, step by step in torch on any device."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_kernels.errors import VariantError
from moe_kernels.quant import fp8, nvfp4
from moe_kernels.records import ExpertWeights, Routing, RoutingConfig
from moe_kernels.registry import VariantSpec
from moe_kernels.variants import packed
from moe_kernels.variants.grouped import Dispatch, Matrix, combine, dispatch, grouped_linear
from moe_kernels.variants.reference import TorchLayer, swiglu
from moe_kernels.variants.weights import expert_matrices, stack, unscaled_nvfp4


@dataclass(frozen=True)
class Quantized:
    """Quantised activations of M rows and K columns.

    FP8: `q` E4M3 [M, K], `scale` FP32 [ceil(K/128), M] dense, as the TRT-LLM kernel reads it.
    NVFP4: `q` uint8 [M, K/2], `scale` E4M3 [M, K/16], `scale_2` FP32, 0-d or [M, 1].
    """

    q: Tensor
    scale: Tensor
    scale_2: Tensor | None = None


class EmulatedLayer(TorchLayer):
    """route, quantize_input, gemm1, activation, quantize_intermediate, gemm2, combine, in this order.

    Each is a method of its own so that fault injection can override one. Rows are sorted by expert between
    gemm1 and gemm2 (`Dispatch`); all of it is FP32 and deterministic, and on a CPU a token's result does not
    depend on the rest of the batch. Not emulated: routing weights stored as BF16, and expert outputs rounded
    to BF16 before they are combined.
    """

    def __init__(
        self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec
    ) -> None:
        super().__init__(record, config, bias, spec)
        if record.format != spec.format:
            raise VariantError(f"variant '{spec}' needs {spec.format} expert weights, these are {record.format}")
        self._w13 = self._keep(partial(self.matrix, record, which="w13"))
        self._w2 = self._keep(partial(self.matrix, record, which="w2"))

    def _keep(self, matrix: Matrix) -> Tensor | Matrix:
        kept = stack(matrix, self.shape.num_experts, torch.float32, self)
        return matrix if kept is None else kept

    def experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """[T, H] in and out, output in hidden.dtype."""
        if not hidden.shape[0]:
            return torch.zeros_like(hidden)
        plan = self.plan(routing)
        gate_up = self.gemm1(self.quantize_input(hidden), plan)
        intermediate = self.quantize_intermediate(self.activation(gate_up), plan)
        return self.combine(self.gemm2(intermediate, plan), routing, plan).to(hidden.dtype)

    def plan(self, routing: Routing) -> Dispatch:
        """Rows sorted by expert."""
        return dispatch(routing, self.shape.num_experts)

    def matrix(self, record: ExpertWeights, expert: int, which: str) -> Tensor:
        """FP32 [N, K] that the products use for one expert; `which` is "w13" or "w2"."""
        return expert_matrices(record, expert, which)

    @abstractmethod
    def quantize_input(self, hidden: Tensor) -> Quantized:
        """Quantise hidden [T, H], once per token whatever experts it goes to."""

    @abstractmethod
    def gemm1(self, x: Quantized, plan: Dispatch) -> Tensor:
        """FP32 [R, 2I] = [gate; up] of the sorted rows, from the T quantised tokens."""

    def activation(self, gate_up: Tensor) -> Tensor:
        """FP32 [R, I] SwiGLU with the record's `swiglu_limit`."""
        return swiglu(gate_up, self.swiglu_limit)

    @abstractmethod
    def quantize_intermediate(self, intermediate: Tensor, plan: Dispatch) -> Quantized:
        """Quantise FP32 [R, I] as the kernel does between its two products."""

    @abstractmethod
    def gemm2(self, intermediate: Quantized, plan: Dispatch) -> Tensor:
        """FP32 [R, H] expert outputs, before weighting."""

    def combine(self, rows: Tensor, routing: Routing, plan: Dispatch) -> Tensor:
        """FP32 [T, H]: sum over slots of weight * row, in slot order."""
        return combine(rows, routing, plan)


class Fp8EmulatedLayer(EmulatedLayer):
    """`fp8/emulated`: activations 1x128, weights 128x128, E4M3 with FP32 scales (DeepSeek-V3's scheme).

    A kernel computes, per block b of 128 columns, (sum_k qx qw) * sx_b * sw_b, and adds blocks up in FP32.
    Here the scales are multiplied into both operands first and one FP32 product runs over all columns. The
    two are equal in real arithmetic; each rounds qx*sx and qw*sw (here) or the partial sums (there) to 24
    bits, so they differ as two FP32 summation orders do (about 1e-6 of the largest term), four orders of
    magnitude below E4M3's own step of 2^-3. tests/parity holds both against a per-block FP64 emulation.

    `scales=direct`: the quantiser writes the input scales column-major, whose transpose is dense.
    `scales=copied`: row-major scales, then `.t().contiguous()`: the copy SGLang #28555 removed. Same bits.

    `gemm1_output`: "fp32" keeps gate and up in FP32 until the activation, as the Triton kernels (BF16) nearly
    do. TRT-LLM's own DeepSeek-FP8 path stores them as E4M3 with a scale per 1x128 (its batched GEMM writes
    E4M3 and a separate kernel does the SwiGLU); set "fp8" in a subclass to emulate that too.
    """

    gemm1_output = "fp32"

    def __init__(
        self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec
    ) -> None:
        super().__init__(record, config, bias, spec)
        # On a CPU oneDNN does the products: for every batch or none, since its FP32 sums differ from MKL's.
        self._onednn = packed.usable(self.shape, torch.float32, record.w13.device)
        self._dense: packed.Packed | None = None
        if self._onednn:
            self._dense = packed.Packed.make(self._w13, self._w2, self)
            self._separate = {id(w): packed.separable(w, self) for w in (self._w13, self._w2)}
        self._own_class = type(self)

    def plan(self, routing: Routing) -> Dispatch:
        """For few tokens every expert computes all; a fault's class, mixed in later, sees rows sorted by expert."""
        if (self._dense is not None and routing.ids.shape[0] <= packed.DENSE_TOKENS
                and type(self) is self._own_class):
            return self._dense.plan(routing.ids)
        return super().plan(routing)

    def product(self, rows: Tensor, plan: Dispatch, matrices: Tensor | Matrix) -> Tensor:
        """Sorted rows times the matrices of their experts."""
        if self._onednn:
            return packed.separate(rows, plan, self._separate[id(matrices)])
        return grouped_linear(rows, plan, matrices)

    def quantize_input(self, hidden: Tensor) -> Quantized:
        """E4M3 and scales [H/128, T], by the route that `scales=` names."""
        if self.spec.option("scales") == "copied":
            q, scale = fp8.quantize_activations(hidden, layout="row")
            return Quantized(q, scale.t().contiguous())
        q, scale = fp8.quantize_activations(hidden, layout="column")
        return Quantized(q, scale.t())

    def gemm1(self, x: Quantized, plan: Dispatch) -> Tensor:
        """Dequantised tokens, gathered to their experts, times w13."""
        tokens = fp8.dequantize_activations(x.q, x.scale.t())
        if plan.place is not None and self._dense is not None:
            gate_up = self._dense.gate_up(tokens, plan.place)
        else:
            gate_up = self.product(tokens[plan.token], plan, self._w13)
        if self.gemm1_output == "fp8":
            gate_up = torch.cat([_through_fp8(half) for half in gate_up.chunk(2, dim=-1)], dim=-1)
        return gate_up

    def quantize_intermediate(self, intermediate: Tensor, plan: Dispatch) -> Quantized:
        """E4M3, 1x128 again."""
        q, scale = fp8.quantize_activations(intermediate, layout="column")
        return Quantized(q, scale.t())

    def gemm2(self, intermediate: Quantized, plan: Dispatch) -> Tensor:
        """Dequantised intermediate times w2."""
        rows = fp8.dequantize_activations(intermediate.q, intermediate.scale.t())
        if plan.place is not None and self._dense is not None:
            return self._dense.down(rows, plan.place, plan.slot_row.shape[0])
        return self.product(rows, plan, self._w2)


def _through_fp8(x: Tensor) -> Tensor:
    return fp8.dequantize_activations(*fp8.quantize_activations(x))


class NvFp4EmulatedLayer(EmulatedLayer):
    """`nvfp4/emulated`: activations and weights E2M1 with an E4M3 scale per 16 columns and FP32 scalars.

    Input scalar: the checkpoint's `input_scale`. `input_scale=max`: one per layer, the largest over experts and
    halves for w13 and over experts for w2 (as vLLM does for the TRT-LLM kernel). `input_scale=expert`: every
    expert its own, the larger of its halves for w13, so that a token is quantised once for each of its experts
    (CUTLASS paths; engines differ in this, see vLLM #26135 and SGLang #10296). Where the checkpoint has none,
    each token gets amax / (6 * 448) of its own (FlashInfer's per-token activation scale) under either, because
    one scalar for the whole batch would make a token's result depend on its neighbours.

    The products run over e2m1 * block scale, exact in FP32; the scalars multiply the sums: gate and up each
    by input_scale * their own weight_scale_2 (the kernel's two output scalars), w2 by its one.
    """

    def __init__(
        self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec
    ) -> None:
        super().__init__(record, config, bias, spec)
        if record.w13_scale_2 is None or record.w2_scale_2 is None:
            raise VariantError(f"variant '{spec}' needs weight_scale_2 of every expert")
        self.w13_scale_2 = record.w13_scale_2.float()  # [E, 2]: gate, up
        self.w2_scale_2 = record.w2_scale_2.float()  # [E]
        self.per_expert = spec.option("input_scale") == "expert" and record.w13_input_scale is not None
        self.input_scale = _largest(record.w13_input_scale, self.per_expert)  # 0-d, or [E] per expert
        self.intermediate_scale = _largest(record.w2_input_scale, self.per_expert)

    def matrix(self, record: ExpertWeights, expert: int, which: str) -> Tensor:
        """e2m1 * block scale, without scale_2."""
        return unscaled_nvfp4(record, expert, which)

    def experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """[T, H] in and out; with scalars per expert the rows are gathered before they are quantised."""
        if not self.per_expert or not hidden.shape[0]:
            return super().experts(hidden, routing)
        plan = dispatch(routing, self.shape.num_experts)
        x = _quantize_nvfp4(hidden[plan.token], self._of_rows(self.input_scale, plan))
        gate_up = self.gemm1(x, plan.gathered())
        intermediate = self.quantize_intermediate(self.activation(gate_up), plan)
        return self.combine(self.gemm2(intermediate, plan), routing, plan).to(hidden.dtype)

    def quantize_input(self, hidden: Tensor) -> Quantized:
        """Packed E2M1 and E4M3 scales under the layer's input scale."""
        return _quantize_nvfp4(hidden, self.input_scale)

    def gemm1(self, x: Quantized, plan: Dispatch) -> Tensor:
        """Exact products, then the two scalars of each row's expert."""
        sums = grouped_linear(_unscaled(x)[plan.token], plan, self._w13)
        alpha = _rows(x.scale_2, plan.token) * self.w13_scale_2[plan.expert]  # [R, 2]
        return (sums.unflatten(-1, (2, -1)) * alpha.unsqueeze(-1)).flatten(-2)

    def quantize_intermediate(self, intermediate: Tensor, plan: Dispatch) -> Quantized:
        """E2M1 again, under w2's input scale."""
        return _quantize_nvfp4(intermediate, self._of_rows(self.intermediate_scale, plan))

    def gemm2(self, intermediate: Quantized, plan: Dispatch) -> Tensor:
        """Exact products, then the scalar of each row's expert."""
        sums = grouped_linear(_unscaled(intermediate), plan, self._w2)
        return sums * (_rows(intermediate.scale_2) * self.w2_scale_2[plan.expert].unsqueeze(-1))


    @staticmethod
    def _of_rows(scale: Tensor | None, plan: Dispatch) -> Tensor | None:
        """A scalar per expert as [R, 1]; anything else as it is."""
        return scale if scale is None or scale.ndim == 0 else scale[plan.expert].unsqueeze(-1)


def _largest(scale: Tensor | None, per_expert: bool) -> Tensor | None:
    if scale is None:
        return None
    return scale.float().reshape(scale.shape[0], -1).amax(-1) if per_expert else scale.float().amax()


def _quantize_nvfp4(x: Tensor, scale_2: Tensor | None) -> Quantized:
    if scale_2 is None:
        scale_2 = nvfp4.scale_from_amax(x.float().abs().amax(-1, keepdim=True))
    return Quantized(*nvfp4.quantize(x, scale_2, check_finite=False), scale_2)


def _unscaled(x: Quantized) -> Tensor:
    """FP32 e2m1 * block scale, exact."""
    return nvfp4.dequantize(x.q, x.scale, torch.ones((), device=x.q.device))


def _rows(scale_2: Tensor | None, index: Tensor | None = None) -> Tensor:
    """The activation scalar as something that broadcasts over rows, [M, 1] or 0-d."""
    assert scale_2 is not None
    return scale_2 if scale_2.ndim == 0 or index is None else scale_2[index]
