"""Compiled CPU kernels: attention over the paged KV cache and the small operations between matrix products.

A step of 32 decoding rows of a small model is some 700 torch operations of 2 to 5 us each; these do several of them in
a call. The C sources under `src` are compiled once per machine with its C compiler (see `build`); where
there is none, or MOE_PARITY_NATIVE=0, `library()` is None and callers use torch. Callers say which they use: the
service's fingerprint names its attention and its kernels.
"""

from moe_kernels.native.bindings import DTYPES, Library, fits, library, unavailable_because

__all__ = ["DTYPES", "Library", "fits", "library", "unavailable_because"]
