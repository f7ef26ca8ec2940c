"""Reference variants: plain matrix products over (dequantised) weights; in FP32 they are the oracle."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_kernels import native
from moe_kernels.batch_invariant import silu
from moe_kernels.errors import VariantError
from moe_kernels.records import ExpertWeights, Routing, RoutingConfig
from moe_kernels.registry import MoELayer, VariantSpec
from moe_kernels.routing import check_routing, route
from moe_kernels.variants import packed
from moe_kernels.variants.grouped import Matrix, combine, dispatch, grouped_linear
from moe_kernels.variants.weights import expert_matrices, stack


class TorchLayer(MoELayer):
    """What the reference and emulated layers share: routing with `bias=`, and refusing reduced-precision FP32."""

    switchable = frozenset(("bias", "scales"))

    def __init__(
        self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec
    ) -> None:
        super().__init__(record, config, bias, spec)
        check_routing(config)
        if torch.get_float32_matmul_precision() != "highest":
            raise VariantError(
                f"variant '{spec}' needs true FP32 products, but torch.get_float32_matmul_precision() is "
                f"'{torch.get_float32_matmul_precision()}'; call torch.set_float32_matmul_precision('highest')"
            )
        self.swiglu_limit = record.swiglu_limit

    def route(self, router_logits: Tensor) -> Routing:
        """See `moe_kernels.routing.route`; `bias=bf16` rounds the bias first."""
        dtype = torch.bfloat16 if self.spec.option("bias") == "bf16" else torch.float32
        return route(router_logits, self.bias, self.config, bias_dtype=dtype)


def swiglu(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """silu(gate) * up from [..., 2I] = [gate; up], in the input's dtype.

    `limit` (GLM-5.3-Flash's `swiglu_limit`): gate at most `limit`, up within +-`limit`, before the silu.
    """
    if (limit is None and gate_up.device.type == "cpu" and native.fits(gate_up.dtype, gate_up.shape[-1] // 2)
            and gate_up.is_contiguous() and (kernels := native.library()) is not None):
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


class ReferenceLayer(TorchLayer):
    """`bf16/reference` and the references of all other formats.

    `bf16/reference`: weights rounded to BF16 (exact for a BF16 checkpoint), products and activation in the
    model's dtype as stock transformers does, combined in FP32. It takes a record of any format.
    `fp8/reference`, `nvfp4/reference`, ...: dequantised FP32 weights, everything in FP32, activations not
    quantised: the oracle. Output in hidden.dtype. On a CPU a token's result does not depend on the rest of the batch.
    """

    def __init__(
        self, record: ExpertWeights, config: RoutingConfig, bias: Tensor | None, spec: VariantSpec
    ) -> None:
        super().__init__(record, config, bias, spec)
        if spec.format != "bf16" and record.format != spec.format:
            raise VariantError(f"variant '{spec}' needs {spec.format} expert weights, these are {record.format}")
        self._weight_dtype = torch.bfloat16 if spec.format == "bf16" else torch.float32
        if record.format == "bf16":
            self._w13: Tensor | Matrix = record.w13
            self._w2: Tensor | Matrix = record.w2
            self._compute_dtype: torch.dtype = torch.bfloat16
        else:
            self._compute_dtype = self._weight_dtype
            self._w13 = self._keep(partial(self._rounded, record, which="w13"))
            self._w2 = self._keep(partial(self._rounded, record, which="w2"))
        self._packed: packed.Packed | None = None
        if self._compute_dtype == torch.bfloat16 and packed.usable(self.shape, torch.bfloat16, record.w13.device):
            self._packed = packed.Packed.make(self._w13, self._w2, self)

    def _rounded(self, record: ExpertWeights, expert: int, which: str) -> Tensor:
        return expert_matrices(record, expert, which).to(self._weight_dtype)

    def _keep(self, matrix: Matrix) -> Tensor | Matrix:
        kept = stack(matrix, self.shape.num_experts, self._compute_dtype, self)
        return matrix if kept is None else kept

    def experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """[T, H] in and out; see the class."""
        if not hidden.shape[0]:
            return torch.zeros_like(hidden)
        dtype = hidden.dtype if self._weight_dtype == torch.bfloat16 else torch.float32
        if dtype != self._compute_dtype:
            self._recast(dtype)
        if self._packed is not None and hidden.shape[0] <= packed.DENSE_TOKENS:
            kernels = native.library()
            if kernels is not None and self.swiglu_limit is None and self._packed.fits_native:
                return self._packed.experts_of(hidden, routing, kernels)
            plan = self._packed.plan(routing.ids)
            assert plan.place is not None
            act = swiglu(self._packed.gate_up(hidden, plan.place), self.swiglu_limit)
            return combine(self._packed.down(act, plan.place, hidden.shape[0]), routing, plan, hidden.dtype)
        plan = dispatch(routing, self.shape.num_experts)
        gate_up = grouped_linear(hidden.to(dtype)[plan.token], plan, self._w13)
        out = grouped_linear(swiglu(gate_up, self.swiglu_limit), plan, self._w2)
        return combine(out, routing, plan, hidden.dtype)

    def _recast(self, dtype: torch.dtype) -> None:
        """Serve another hidden dtype (an FP32 model on BF16 weights); happens at the first call."""

        def cast(matrices: Tensor | Matrix) -> Tensor | Matrix:
            at = matrices.__getitem__ if isinstance(matrices, Tensor) else matrices
            return self._keep(lambda expert: at(expert).to(dtype))

        self._compute_dtype, self._packed = dtype, None
        self._w13, self._w2 = cast(self._w13), cast(self._w2)
