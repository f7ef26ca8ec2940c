"""Checkpoint formats, read into one canonical expert record."""

from moe_kernels.formats.checkpoint import Checkpoint, open_checkpoint
from moe_kernels.formats.experts import dequantize

__all__ = ["Checkpoint", "dequantize", "open_checkpoint"]
