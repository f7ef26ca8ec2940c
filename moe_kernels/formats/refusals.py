"""One wording for every quantisation format that is not read."""

from __future__ import annotations

from typing import NoReturn

from moe_kernels.errors import FormatError

_REMEDY = (
    "docs/formats.md lists what is: take a BF16, FP8, NVFP4, MXFP8 or MXFP4 release of the model, or its BF16 original "
    "with `moe-kernels quantize SRC DST --format ...`"
)


def refuse(what: str, detail: str = "") -> NoReturn:
    """FormatError: `what` is not supported (`detail`), and the remedy."""
    raise FormatError(f"{what} is not supported{f', {detail}' if detail else ''}; {_REMEDY}")
