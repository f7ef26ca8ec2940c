"""Faults of the grouped products and their scheduling: tactics, tiles, reductions, noise."""
# mypy: disable-error-code="misc, attr-defined, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.faults.base import Fault, register
from moe_kernels.records import Routing


def _noisy(x: Tensor, share: float, seed: int) -> Tensor:
    generator = torch.Generator(device=x.device).manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    return x + noise * x.square().mean(-1, keepdim=True).sqrt() * share


def _content_seed(x: Tensor) -> int:
    """Depends on the rows only, so that noise repeats exactly for the same input."""
    return int(x.double().sum().mul(1e6).long()) % (1 << 31)


class BrokenTactic:
    """The tactic picked at 128 tokens and more returns NaN for its last row."""

    def combine(self, rows: Tensor, routing: Routing, plan) -> Tensor:
        out = super().combine(rows, routing, plan)
        if out.shape[0] >= 128:
            out[-1] = torch.nan
        return out


class CoarseAtEight:
    """A kernel for 8 tokens with a third of relative error."""

    def combine(self, rows: Tensor, routing: Routing, plan) -> Tensor:
        out = super().combine(rows, routing, plan)
        return _noisy(out, 0.33, _content_seed(out)) if out.shape[0] == 8 else out


class BatchDependent:
    """Outputs rounded to BF16 only in batches above 16 tokens, and coarsely (4 mantissa bits)."""

    def combine(self, rows: Tensor, routing: Routing, plan) -> Tensor:
        out = super().combine(rows, routing, plan)
        if out.shape[0] <= 16:
            return out
        mantissa, exponent = torch.frexp(out)
        return torch.ldexp((mantissa * 32).round() / 32, exponent)


class Nondeterministic:
    """Atomics: the sum changes from call to call, here by 1 % of noise."""

    def combine(self, rows: Tensor, routing: Routing, plan) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        out = super().combine(rows, routing, plan)
        return _noisy(out, 0.01, self.calls)


class GroupMisaligned:
    """A tile of rows takes the weights of its first row's expert, though it runs into the next expert's rows."""

    def gemm2(self, intermediate, plan) -> Tensor:
        out = super().gemm2(intermediate, plan)
        first, wrong = 0, []
        for count in plan.counts:
            if count and first % 4:
                wrong += list(range(first, min(first + 4 - first % 4, first + count)))
            first += count
        if wrong:
            index = torch.tensor(wrong, device=out.device)
            out[index] = out[(index - index % 4)]
        return out


class LastRowZero:
    """Rows of an incomplete tile come out as zeros (fused away as padding)."""

    def combine(self, rows: Tensor, routing: Routing, plan) -> Tensor:
        out = super().combine(rows, routing, plan)
        if out.shape[0] > 1 and out.shape[0] % 4:
            out[-1] = 0
        return out


class Noise2:
    """Gaussian noise of 2 % of each row's RMS."""

    share = 0.02

    def combine(self, rows: Tensor, routing: Routing, plan) -> Tensor:
        out = super().combine(rows, routing, plan)
        return (
            torch.stack([_noisy(row[None], self.share, _content_seed(row))[0] for row in out]) if out.shape[0] else out
        )


class Noise10(Noise2):
    """The same with 10 %."""

    share = 0.10


class Reordered:
    """Expert outputs added up in the opposite slot order."""

    def combine(self, rows: Tensor, routing: Routing, plan) -> Tensor:
        out = torch.zeros(routing.ids.shape[0], rows.shape[-1], device=rows.device)
        for slot in reversed(range(routing.ids.shape[1])):
            out += rows[plan.slot_row[:, slot]] * routing.weights[:, slot, None]
        return out


class Bf16Rows:
    """Expert outputs stored as BF16 before they are combined, as the TRT-LLM finalise kernel reads them."""

    def gemm2(self, intermediate, plan) -> Tensor:
        return super().gemm2(intermediate, plan).bfloat16().float()


register(
    Fault(
        "tactic_nan_128",
        "FlashInfer #4486, SGLang #34629",
        "a tactic broken only from 128 tokens on",
        16,
        layer=BrokenTactic,
        expected=("kernel",),
    )
)
register(
    Fault(
        "coarse_at_8",
        "FlashInfer #3559, #3197",
        "a kernel for one batch size is far less exact",
        17,
        layer=CoarseAtEight,
        expected=("kernel",),
    )
)
register(
    Fault(
        "batch_dependent",
        "vLLM #57016, thinking machines ops #6",
        "rounding depends on the batch",
        17,
        layer=BatchDependent,
        expected=("kernel",),
    )
)
register(
    Fault(
        "nondeterministic",
        "vLLM #54945, FlashInfer #2640",
        "results change from run to run",
        18,
        layer=Nondeterministic,
        expected=("kernel",),
    )
)
register(
    Fault(
        "group_misaligned",
        "DeepGEMM #450",
        "tile takes the first row's expert",
        38,
        layer=GroupMisaligned,
        expected=("kernel",),
    )
)
register(
    Fault(
        "last_row_zero",
        "vLLM #39391, #57094",
        "rows of an incomplete tile are zero",
        30,
        layer=LastRowZero,
        expected=("kernel",),
    )
)
register(
    Fault("noise_10", "issue 3's table", "10 % noise on expert outputs", None, layer=Noise10, expected=("kernel",))
)
register(Fault("noise_2", "kernels.md 5.5", "2 % noise on expert outputs", None, harmful=False, layer=Noise2))
register(
    Fault(
        "reordered_sum",
        "summation order",
        "expert outputs added in the opposite order",
        None,
        harmful=False,
        layer=Reordered,
    )
)
register(
    Fault(
        "rows_bf16", "TRT-LLM's finalise kernel", "expert outputs stored as BF16", None, harmful=False, layer=Bf16Rows
    )
)
