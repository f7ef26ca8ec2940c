"""Errors a user can cause: each message names the tensor, key or value at fault and the remedy."""

from __future__ import annotations


class MoeParityError(Exception):
    """Base class; command-line tools print the message on one line and exit with code 2."""


class CheckpointError(MoeParityError):
    """A checkpoint file, tensor or config entry is missing, extra, mis-shaped, truncated or not finite."""


class FormatError(MoeParityError):
    """The checkpoint's quantisation format is known but not supported, or not recognised."""


class VariantError(MoeParityError):
    """The variant's name or option is unknown, or it does not support this device or model."""


class ContractError(MoeParityError):
    """A kernel call would break what the kernel requires of dtypes, shapes, strides or values."""


class QuantizationError(MoeParityError):
    """A tensor cannot be quantised: it holds NaN or infinity, or its shape does not fit the block size."""
