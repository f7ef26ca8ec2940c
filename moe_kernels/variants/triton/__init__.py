"""Triton kernels of the `fp8/triton` and `nvfp4/triton` variants: Hopper first, correct from SM89 (FP8) and SM80 (NVFP4)."""
