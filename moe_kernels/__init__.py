"""Quantised MoE kernels: formats, numerics, routing and named kernel variants for GLM-style models."""

__version__ = "0.1.0"
