"""Triton kernels of the serving operations, Hopper first; no module here is imported without Triton."""
