"""Triton kernels of `fp8/triton` and `nvfp4/triton`: Hopper first, FP8 from SM89, NVFP4 from SM80."""
