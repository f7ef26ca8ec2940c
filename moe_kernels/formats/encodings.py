"""How publishers store one quantised matrix: names, shapes and dtypes of its tensors, and what its scales mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe_kernels.quant.blocks import ceil_div
from moe_kernels.records import FP8_BLOCK, MX_GROUP, NVFP4_GROUP, WeightFormat

Activations = Literal["dynamic", "static", "none"]


@dataclass(frozen=True)
class Encoding:
    """One weight format under one publisher's names.

    `scale` lists the names that are read, the first is written. With `reciprocal` the scalars `scale_2` and
    `input_scale` are stored as 1 / x (compressed-tensors: 448 * 6 / amax) and inverted when they are read.
    `activations`: what the publisher means kernels to do with them; "none" is weight-only.
    """

    format: WeightFormat
    label: str
    weight: str = "weight"
    scale: tuple[str, ...] = ("weight_scale",)
    scale_2: str | None = None
    input_scale: str | None = None
    reciprocal: bool = False
    activations: Activations = "dynamic"
    scale_shape: Literal["plain", "flat", "4d"] = "plain"  # as written: [N, 1] or [N]; [ob, ib] or [ob, 1, ib, 1]
    e8m0: bool = False  # block FP8 whose scales the config declares as powers of two

    def weight_only(self, label: str | None = None) -> Encoding:
        """The same storage with activations left alone."""
        return replace(self, activations="none", label=label or f"{self.label}, weight-only")

    @property
    def weight_dtype(self) -> str:
        """safetensors dtype of the weight."""
        return "U8" if self.format in ("nvfp4", "mxfp4") else "F8_E4M3"

    def weight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Stored shape of a logical [rows, columns]."""
        return (rows, columns // 2) if self.weight_dtype == "U8" else (rows, columns)

    def scale_dtypes(self) -> tuple[str, ...]:
        """safetensors dtypes of the scale that are read."""
        if self.format == "nvfp4":
            return ("F8_E4M3",)
        if self.format in ("mxfp8", "mxfp4"):
            return ("U8", "F8_E8M0")
        # a float8_e8m0fnu scale says itself what it is, bytes only where the config does
        return ("F32", "BF16", "F16", "F8_E8M0") + (("U8",) if self.e8m0 else ())

    def scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the scale that are read; all hold the record's elements in its order."""
        if self.format == "fp8":
            blocks = (ceil_div(rows, FP8_BLOCK), ceil_div(columns, FP8_BLOCK))
            squeezed = tuple(n for n in blocks if n > 1)  # as ModelOpt's exporter leaves them
            return blocks, (blocks[0], 1, blocks[1], 1), squeezed
        if self.format == "fp8_channel":
            return (rows, 1), (rows,)
        if self.format == "fp8_tensor":
            return (), (1,), (1, 1)
        return ((rows, columns // (NVFP4_GROUP if self.format == "nvfp4" else MX_GROUP)),)

    @property
    def group(self) -> int:
        """The number of columns must be a multiple of this."""
        return {"nvfp4": NVFP4_GROUP, "mxfp8": MX_GROUP, "mxfp4": MX_GROUP}.get(self.format, 1)


BLOCK_FP8 = Encoding("fp8", "block FP8 (format A)", scale=("weight_scale_inv",))
TENSOR_FP8_HF = Encoding(
    "fp8_tensor", "per-tensor FP8 (quant_method fp8, like format H)", scale=("weight_scale", "weight_scale_inv"),
    input_scale="input_scale", activations="static",
)  # fmt: skip
MXFP8_HF = Encoding("mxfp8", "MXFP8 (format G)", scale=("weight_scale_inv", "weight_scale"))

CT_CHANNEL = Encoding("fp8_channel", "compressed-tensors channel FP8 (format B)")
CT_BLOCK = Encoding("fp8", "compressed-tensors block FP8 (format B')")
CT_TENSOR = Encoding("fp8_tensor", "compressed-tensors per-tensor FP8 (like format B)", input_scale="input_scale")
CT_NVFP4 = Encoding(
    "nvfp4", "compressed-tensors NVFP4 (format D)", weight="weight_packed", scale_2="weight_global_scale",
    input_scale="input_global_scale", reciprocal=True, activations="static",
)  # fmt: skip
CT_MXFP4 = Encoding("mxfp4", "compressed-tensors MXFP4 (format E)", weight="weight_packed")
CT_MXFP8 = Encoding("mxfp8", "compressed-tensors MXFP8 (format G)")

MO_NVFP4 = Encoding(
    "nvfp4", "ModelOpt NVFP4 (format C)", scale_2="weight_scale_2", input_scale="input_scale", activations="static"
)
MO_NVFP4_WO = MO_NVFP4.weight_only("ModelOpt weight-only NVFP4, W4A16 (format C'')")
MO_TENSOR = Encoding(
    "fp8_tensor", "ModelOpt per-tensor FP8 (format H)", input_scale="input_scale", activations="static"
)
MO_CHANNEL = Encoding("fp8_channel", "ModelOpt per-channel FP8 (format H)", scale_shape="flat")
MO_BLOCK = Encoding("fp8", "ModelOpt weight-only block FP8 (format H)", activations="none", scale_shape="4d")
MO_MXFP8 = Encoding("mxfp8", "ModelOpt MXFP8 (format G)")
MO_MXFP4 = Encoding("mxfp4", "ModelOpt MXFP4 (format E)")

QUARK_MXFP4 = Encoding("mxfp4", "AMD Quark MXFP4 (format F)")
QUARK_NVFP4 = Encoding(
    "nvfp4", "AMD Quark NVFP4 (format F)", scale_2="weight_scale_2", input_scale="input_scale", activations="static"
)
QUARK_TENSOR = Encoding("fp8_tensor", "AMD Quark per-tensor FP8 (format F)", input_scale="input_scale")
QUARK_CHANNEL = Encoding("fp8_channel", "AMD Quark per-channel FP8 (format F)", scale_shape="flat")
QUARK_MXFP8 = Encoding("mxfp8", "AMD Quark MXFP8 (format F)")
